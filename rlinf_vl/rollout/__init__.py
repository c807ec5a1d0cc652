"""Samples graded trajectories: the rollout worker (a Ray actor), the pool, and their parts."""
