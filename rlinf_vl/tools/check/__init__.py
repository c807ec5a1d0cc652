"""Checks before a run: inputs, data, rewards, environments, agents and the machine."""
