"""Reinforcement learning for vision-language models: a Ray-based distributed actor system."""

__version__ = "0.1.0"
