"""One HTML file that shows a run, or compares several: curves, trajectories token by token, configuration, events."""

from rlinf_vl.tools.report.build import build_report

__all__ = ["build_report"]
