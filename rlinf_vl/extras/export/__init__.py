"""Checkpoints as folders that transformers loads, and their model cards."""
