"""The verb `eval`: figures and trajectories of a model on the validation rows."""
