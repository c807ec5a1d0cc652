"""The rollout workers on Ray: their places, life and death, dispatch and weights."""
