"""Who trains what, in which micro-batch (`planner`), and how trajectories become one packed row (`collator`)."""
