"""The figures of a group's trajectories, read and changed as lists."""

from dataclasses import replace

from rlinf_vl.types import GroupSummary


def values(summary: GroupSummary, name: str) -> tuple:
    """Return the field `name` of each trajectory."""
    return tuple(getattr(trajectory, name) for trajectory in summary.trajectories)


def changed(summary: GroupSummary, **lists) -> GroupSummary:
    """Return the group with other values of its trajectories, a list for each field."""
    trajectories = [
        replace(trajectory, **{name: values[i] for name, values in lists.items()})
        for i, trajectory in enumerate(summary.trajectories)
    ]
    return replace(summary, trajectories=tuple(trajectories))
