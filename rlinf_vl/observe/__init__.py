"""What a run shows of itself: metrics, trackers, the progress line. Curves: `python -m rlinf_vl.observe.curve`.

Nothing is imported here: the command line needs the progress line within a fraction of a second, and metrics need torch."""
