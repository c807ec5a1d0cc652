"""What a run shows of itself: metrics, trackers, the progress line. Curves: `python -m rlinf_vl.observe.curve`."""

from rlinf_vl.observe.lines import EventLog, StepLines, read_steps
from rlinf_vl.observe.metrics import MetricSums, summarize_rollout
from rlinf_vl.observe.progress import RunProgress, setup_logging
from rlinf_vl.observe.tracker import (
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    Trackers,
    WandbTracker,
    make_trackers,
)

__all__ = [
    "EventLog",
    "JsonlTracker",
    "MetricSums",
    "RunProgress",
    "StepLines",
    "TensorBoardTracker",
    "Tracker",
    "Trackers",
    "WandbTracker",
    "make_trackers",
    "read_steps",
    "setup_logging",
    "summarize_rollout",
]
