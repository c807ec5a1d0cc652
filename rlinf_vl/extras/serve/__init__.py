"""A chat endpoint over a trained policy."""
