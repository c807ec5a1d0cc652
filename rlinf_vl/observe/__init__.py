"""What a run shows of itself: metrics, trackers, status, spans, trajectories.

Nothing is imported here: the command line needs the progress line within a fraction of a second, and metrics need torch."""
