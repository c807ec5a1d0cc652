"""Figures by set: validation accuracy, and training reward, of the rows of each data set.

A set is the rows with one value of a column (`data.val_group_by`): the sources of a mixture, or
levels of difficulty.
"""

import logging
import math
import re
from collections.abc import Iterator, Sequence

from rlinf_vl.errors import RunError, nearest
from rlinf_vl.types import GroupSummary

logger = logging.getLogger(__name__)

#: The column that names the sets where the config names none.
USUAL_COLUMN = "data_source"
#: Most sets. A column with more values, such as an id, would fill the metrics.
MAX_SETS = 64
#: The set of the rows that lack the column, if other rows have it.
NO_SET = "no_set"
#: Names behind `val/` that other metrics have.
_TAKEN = {"reward", "env", "agent"}


def val_set_metrics(
    summaries: Sequence[GroupSummary], column: str | None, key: str = "data.val_group_by"
) -> dict[str, float]:
    """Return the accuracy of each set with its standard error, and the mean over the sets.

    A failed answer is a wrong one, as in `val/accuracy`. {} without several sets, unless `column`
    names them.

    Args:
        column: `data.val_group_by`; None: `data_source`.

    Raises:
        RunError: no row has the column, or it has more than `MAX_SETS` values.
    """
    metrics: dict[str, float] = {}
    accuracies, variances = [], []
    for name, members in _sets(summaries, column, key):
        correct = [t.correct for s in members for t in s.trajectories]
        n = len(correct)
        accuracy = sum(correct) / max(1, n)
        variance = accuracy * (1 - accuracy) / max(1, n)
        accuracies.append(accuracy)
        variances.append(variance)
        metrics |= {
            f"val/{name}/accuracy": accuracy,
            f"val/{name}/accuracy_stderr": math.sqrt(variance),
            f"val/{name}/problems": n,
        }
    if accuracies:
        metrics["val/accuracy_by_set"] = sum(accuracies) / len(accuracies)
        metrics["val/accuracy_by_set_stderr"] = math.sqrt(sum(variances)) / len(variances)
    return metrics


def train_set_metrics(summaries: Sequence[GroupSummary], column: str | None) -> dict[str, float]:
    """Return the mean reward and the accuracy of each set over the trajectories without an error.

    Raises:
        RunError: as `val_set_metrics`.
    """
    metrics: dict[str, float] = {}
    for name, members in _sets(summaries, column, "data.val_group_by"):
        valid = [t for s in members for t in s.valid]
        if valid:
            metrics[f"train/{name}/reward"] = sum(t.reward for t in valid) / len(valid)
            metrics[f"train/{name}/accuracy"] = sum(t.correct for t in valid) / len(valid)
    return metrics


def _sets(
    summaries: Sequence[GroupSummary], column: str | None, key: str
) -> Iterator[tuple[str, list[GroupSummary]]]:
    """Yield the name and the groups of each set, by name."""
    chosen = USUAL_COLUMN if column is None else column
    members: dict[str, list[GroupSummary]] = {}
    for summary in summaries:
        value = summary.labels.get(chosen)
        members.setdefault(NO_SET if value is None else _name(value), []).append(summary)
    named = len(members.keys() - {NO_SET})
    if column is not None and summaries and not named:
        columns = {name for summary in summaries for name in summary.labels}
        raise RunError(
            f"{key}: no row of this step has {column!r} with a short text or a number; columns "
            f"that have are {', '.join(sorted(columns)) or 'none'};{nearest(column, columns)}".rstrip(
                ";"
            )
        )
    if named > MAX_SETS:
        text = (
            f"{key}: {chosen!r} has {named} values, more than {MAX_SETS} sets; name a coarser one"
        )
        if column is not None:
            raise RunError(text)
        logger.warning("%s", text)
    elif named > 1 or (column is not None and named):
        yield from sorted(members.items())


def _name(value: str | float) -> str:
    """Return the set of a column's value, as a part of a metric's name."""
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", str(value)).strip("_") or "_"
    return f"{name}_set" if name in _TAKEN else name
