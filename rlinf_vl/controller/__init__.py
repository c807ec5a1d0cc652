"""The conductor: `grpo` is the training loop, `launch` starts and places the actors, `step_plan` decides who trains what,
`run_folder` keeps checkpoints. Nothing below imports this package."""
