"""The part of the verb `check-env` that plays agents."""
