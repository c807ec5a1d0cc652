"""The embedded engine: continuous batching in plain PyTorch."""
