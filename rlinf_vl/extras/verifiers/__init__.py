"""Environments of the package `verifiers`: their rows, and the agent that plays them."""
