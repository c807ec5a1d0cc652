"""The split of a validation's gain into *seen* and *guessed*, with standard errors.

For question q let a be the share of right answers with its image and b that under a control (with a
blank image, or another question's). With
the gains Δa and Δb since the first validation,

    Δa = (Δa − Δb) + Δb = seen + guessed:

the part of the gain that needs the image, and the part that comes without it. Each is a mean over
questions of one number a question, and its standard error is s / √N over questions, whose n answers
are one cluster (Miller 2024, "Adding Error Bars to Evals", section 2.2). Differences are formed
within a question, so its difficulty cancels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlinf_vl.types import GroupSummary

#: The accuracy under each control.
ACCURACY_METRICS = {
    "blank": "val/accuracy_blank",
    "swapped": "val/accuracy_swapped",
    "cropped": "val/accuracy_cropped",
}
#: By control: the metrics of each figure of `gains` and of its standard error.
SPLIT_METRICS = {
    "blank": {
        "gain": ("val/gain", "val/gain_stderr"),
        "seen": ("val/gain_seen", "val/gain_seen_stderr"),
        "guessed": ("val/gain_guessed", "val/gain_guessed_stderr"),
    },
    "swapped": {
        "seen": ("val/gain_seen_swapped", "val/gain_seen_swapped_stderr"),
        "guessed": ("val/gain_guessed_swapped", "val/gain_guessed_swapped_stderr"),
    },
}
#: Share of right answers by row.
Shares = Mapping[int, float]


def mean_and_error(values: Sequence[float]) -> dict[str, float | int | None]:
    """Return the mean over problems, its standard error and the number of problems; null where
    there are too few."""
    n = len(values)
    return {
        "mean": float(np.mean(values)) if n else None,
        "standard_error": float(np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else None,
        "problems": n,
    }


def right_shares(rows: Sequence[int], summaries: Sequence[GroupSummary]) -> dict[int, float]:
    """Return the share of right answers to each row; a failed answer is a wrong one."""
    shares = {}
    for row, summary in zip(rows, summaries, strict=True):
        n_right = sum(t.correct for t in summary.trajectories)
        shares[row] = n_right / len(summary.trajectories)
    return shares


def shares_by_control(
    summaries: Mapping[str, Mapping[int, GroupSummary]],
) -> dict[str, dict[int, float]]:
    """Return `right_shares` of each control, from its summaries by row."""
    shares = {}
    for kind, by_row in summaries.items():
        shares[kind] = right_shares(list(by_row), list(by_row.values()))
    return shares


def seen_share(true: Shares, blank: Shares) -> dict[str, float | int | None]:
    """Return the mean of a − b over the questions with both, as `mean_and_error`."""
    return mean_and_error([true[row] - blank[row] for row in blank])


def gains(
    first: Mapping[int, Sequence[float]], true: Shares, control: Shares
) -> dict[str, dict[str, float | int | None]]:
    """Return `gain`, `seen` and `guessed` since the first validation, as `mean_and_error`.

    Args:
        first: row → (a, b) of the first validation. Rows that one of them lacks are left out.
    """
    rows = [row for row in control if row in first]
    guessed_gains = [control[row] - first[row][1] for row in rows]
    gain = [true[row] - first[row][0] for row in rows]
    seen_gains = [g - without for g, without in zip(gain, guessed_gains, strict=True)]
    return {
        "gain": mean_and_error(gain),
        "seen": mean_and_error(seen_gains),
        "guessed": mean_and_error(guessed_gains),
    }


def seeing_metrics(
    true: Shares,
    by_control: Mapping[str, Shares],
    first: Mapping[str, Mapping[int, Sequence[float]]],
) -> dict[str, float]:
    """Return `val/accuracy_<control>`, and the split of the gain by blank and by swapped images.

    Args:
        true: of the questions with their images.
        by_control: kind of control → the same questions, or some of them.
        first: kind of control → as in `gains`.
    """
    metrics: dict[str, float] = {}
    for kind, metric in ACCURACY_METRICS.items():
        if shares := by_control.get(kind):
            metrics[metric] = sum(shares.values()) / len(shares)
    if blank := by_control.get("blank"):
        _add(metrics, "val/seen", "val/seen_stderr", seen_share(true, blank))
    for kind, names in SPLIT_METRICS.items():
        if shares := by_control.get(kind):
            figures = gains(first[kind], true, shares)
            for figure, (mean_metric, error_metric) in names.items():
                _add(metrics, mean_metric, error_metric, figures[figure])
    return metrics


def _add(
    metrics: dict[str, float],
    mean_metric: str,
    error_metric: str,
    figure: Mapping[str, float | int | None],
) -> None:
    """Add a mean and its standard error, where there are enough questions for them."""
    if figure["mean"] is not None:
        metrics[mean_metric] = figure["mean"]
    if figure["standard_error"] is not None:
        metrics[error_metric] = figure["standard_error"]


def first_shares(true: Shares, control: Shares) -> dict[int, list[float]]:
    """Return row → [a, b], what `gains` takes as the first validation."""
    return {row: [true[row], share] for row, share in control.items()}


def control_counts(summaries: Iterable[GroupSummary]) -> dict[str, int]:
    """Return `val/control_errors`: failed answers; and `val/control_env_images`: images that
    environments drew themselves, which no control hides."""
    groups = list(summaries)
    return {
        "val/control_errors": sum(t.error is not None for s in groups for t in s.trajectories),
        "val/control_env_images": sum(s.env_images for s in groups),
    }
