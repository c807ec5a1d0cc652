"""Environments and agents that a task app on another machine plays."""
