"""Names that sweeps and their reports share."""

#: The file of a sweep's folder: its config, its values, and the names of its runs.
SWEEP_FILE = "sweep.json"
#: Keys whose values are repetitions of one setting.
SEEDS = ("runner.seed", "data.seed")
