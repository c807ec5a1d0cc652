"""One HTML file that shows a run, or compares several: curves, trajectories token by token, configuration, events."""
