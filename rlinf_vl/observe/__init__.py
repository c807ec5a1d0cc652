"""The record of a run while it goes on: metrics, trackers, status, spans, trajectories.

Nothing is imported here: the command line needs the progress line within a fraction of a second,
and metrics need torch.
"""
