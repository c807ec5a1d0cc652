"""The training loop: `loop.train` is the algorithm, `run.run` starts its parts, `step_plan` assigns
trajectories to ranks."""
