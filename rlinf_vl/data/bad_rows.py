"""Rows that can't be used: their record (`bad_rows.jsonl` in the run folder), their table, their
limit.

Bad rows are found before training (`FilterResult.bad`) or during it (groups with a failed
trajectory); each counts once. The engine and the environment may fail, too, which is no fault of
the row: `check_faults` describes and limits those failures, and `no_verdicts` those of reward
functions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rlinf_vl.data.unusable import BadRow, shorten
from rlinf_vl.errors import RunError
from rlinf_vl.runtime.files import LineFile, read_lines
from rlinf_vl.types import ENGINE_FAULT, ENVIRONMENT_FAULT, UNGRADABLE, GroupSummary

FILE = "bad_rows.jsonl"
#: Maximum length of a reason in the table, in characters.
SHOWN = 100
#: Maximum share of a rollout's trajectories that may fail in the engine or the environment.
MAX_FAULTS = 0.5


class TooManyBadRows(RunError):
    """More of a split's rows are bad than data.max_bad_rows allows."""


class TooManyFaults(RunError):
    """More than `MAX_FAULTS` of a rollout's trajectories failed in the engine or environment."""


def _is_fault(error: str) -> bool:
    """Return whether an error, "kind: reason", is no fault of the row."""
    return error.partition(": ")[0] in (ENGINE_FAULT, ENVIRONMENT_FAULT, UNGRADABLE)


def check_faults(summaries: Sequence[GroupSummary]) -> str | None:
    """Describe the trajectories that failed in the engine or the environment.

    Returns:
        One line with their number and the most frequent reasons; None without any.

    Raises:
        TooManyFaults: their share is above `MAX_FAULTS`.
    """
    trajectories = [trajectory for summary in summaries for trajectory in summary.trajectories]
    errors = [t.error for t in trajectories if t.error and not t.ungraded]
    faults = [error for error in errors if _is_fault(error)]
    faults += [t.penalized for t in trajectories if t.penalized]
    if not faults:
        return None
    line = f"{len(faults)} of {len(trajectories)} trajectories failed, by no fault of their rows: {_frequent(faults)}"
    if len(faults) > MAX_FAULTS * len(trajectories):
        raise TooManyFaults(
            f"{line}. That is more than half of the rollout. If requests are not answered in time, "
            "set rollout.episode_timeout above 600 or lower rollout.max_running_requests; an error of the "
            "environment is one of the code behind rollout.env_class, or of a reward function"
        )
    return line


class NoVerdicts(RunError):
    """Too many answers of a rollout lack the verdict of a reward function."""


def no_verdicts(summaries: Sequence[GroupSummary], max_share: float = 1.0) -> str | None:
    """Describe the answers that a reward function could not judge.

    Args:
        max_share: `reward.max_ungradable`. A single answer is always allowed.

    Returns:
        One line with their number and the most frequent reasons; None without any.

    Raises:
        NoVerdicts: no answer could be judged, or a larger share than `max_share` could not. Such
            a function has a mistake, and its rewards teach which answers it can read.
    """
    trajectories = [trajectory for summary in summaries for trajectory in summary.trajectories]
    reasons = [t.ungraded for t in trajectories if t.ungraded]
    n_answers = sum(t.error is None or bool(t.ungraded) for t in trajectories)
    if not reasons:
        return None
    line = (
        f"{len(reasons)} of {n_answers} answers have no verdict of a reward function: "
        f"{_frequent(reasons)}"
    )
    if len(reasons) == n_answers:
        share = "So it is with every answer"
    elif len(reasons) > max(1.0, max_share * n_answers):
        share = f"That is more than reward.max_ungradable={max_share:g} allows"
    else:
        return line
    raise NoVerdicts(
        f"{line}. {share}: mend the function (its traceback stands in the log; 'rlinf-vl "
        "check-reward' tries it), leave it out of reward.functions, or raise reward.timeout if it "
        "needs longer"
    )


def _frequent(reasons: Sequence[str]) -> str:
    frequent = Counter(shorten(reason, 3 * SHOWN) for reason in reasons).most_common(3)
    return "; ".join(f"{n} × {reason}" for reason, n in frequent)


class BadRows:
    """The bad rows of a run, in memory and in a file of {step, split, kind, id, reason}, a line per
    row.

    A resumed run reads from the file the rows that became bad in training (step 1 and later); rows
    that are bad before training are checked again.
    """

    def __init__(self, run_dir: Path, max_fraction: float, totals: Mapping[str, int]) -> None:
        """Open the record of a run.

        Args:
            run_dir: the run's folder.
            max_fraction: data.max_bad_rows.
            totals: the number of checked rows of each split.
        """
        self.path = run_dir / FILE
        self._max_fraction = max_fraction
        self._totals = dict(totals)
        self._rows: dict[str, dict[str, BadRow]] = {split: {} for split in totals}
        self._file = LineFile(self.path, durable=True)
        earlier_rows = read_lines(self.path)[0] if self.path.exists() else []
        earlier_rows = [
            row for row in earlier_rows if row.get("step", 0) > 0 and row.get("split") in self._rows
        ]
        if self.path.exists():
            self._file.keep(earlier_rows)
        for row in earlier_rows:
            self._rows[row["split"]][row["id"]] = BadRow(row["kind"], row["id"], row["reason"])

    def add(self, split: str, rows: Iterable[BadRow], step: int = 0) -> None:
        """Record bad rows found at `step` (0 for before training).

        They are on the disk when this returns, unless the disk is full. A row that is recorded
        already keeps its first reason.
        """
        new = {row.id: row for row in rows if row.id not in self._rows[split]}
        self._rows[split] |= new
        if new:
            self._file.append(
                *({"step": step, "split": split, **asdict(row)} for row in new.values())
            )

    def add_failed(self, split: str, summaries: Sequence[GroupSummary], step: int) -> None:
        """Record the rows of groups with an error, "kind: reason", that the row caused."""
        failed = []
        for summary in summaries:
            row_errors = [
                t.error for t in summary.trajectories if t.error and not _is_fault(t.error)
            ]
            if row_errors:
                kind, _, reason = row_errors[0].partition(": ")
                failed.append(BadRow(kind, summary.problem_id, reason or row_errors[0]))
        self.add(split, failed, step)

    def counts(self) -> dict[str, int]:
        """Return the number of bad rows of each split."""
        return {split: len(rows) for split, rows in self._rows.items()}

    def table(self, split: str) -> str:
        """Return a table with one line per kind, the most frequent first.

        A line has the number of rows, and the id and reason of the first of them.
        """
        rows = self._rows[split].values()
        first = {row.kind: row for row in reversed(rows)}
        width = max(map(len, first), default=0)
        lines = []
        for kind, n in Counter(row.kind for row in rows).most_common():
            lines.append(
                f"{n:6}  {kind:{width}}  {first[kind].id}: {shorten(first[kind].reason, SHOWN)}"
            )
        return "\n".join(lines)

    def check(self) -> None:
        """Raise `TooManyBadRows`, with the table, if a split's share of bad rows is too high."""
        for split, n in self.counts().items():
            total = self._totals[split]
            if n and n / total > self._max_fraction:
                raise TooManyBadRows(
                    f"data.max_bad_rows: {n} of the {total} rows of {split} are bad "
                    f"({n / total:.1%}), more than {self._max_fraction:g} allows:\n"
                    f"{self.table(split)}\n"
                    f"Every row and its reason is in {self.path}. Repair these rows or leave them "
                    "out of the data, or raise data.max_bad_rows if training without them is "
                    "right."
                )
