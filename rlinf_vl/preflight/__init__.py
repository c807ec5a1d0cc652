"""Checks before a run: inputs, machine, and the memory that each phase of a step takes."""
