"""Prompts in, graded trajectories out: engines behind one protocol, the rollout worker (a Ray actor) and the pool of them."""
