"""Rows that can't be used, as a record (`bad_rows.jsonl` of the run folder), as a table of reasons, and as a limit.

Found before training (`FilterResult.bad`) or during it (groups of which a trajectory failed); each counts once. Faults of the
engine and of the environment are not the row's: `check_faults` describes and limits them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rlinf_vl.data.unusable import BadRow, shorten
from rlinf_vl.errors import RunError
from rlinf_vl.runtime.files import LineFile, read_lines
from rlinf_vl.types import ENGINE_FAULT, ENVIRONMENT_FAULT, GroupSummary

FILE = "bad_rows.jsonl"
#: Characters of a reason in the table.
SHOWN = 100
#: Share of the trajectories of one rollout that may fail in the engine or the environment.
MAX_FAULTS = 0.5


class TooManyBadRows(RunError):
    """More of a split's rows are bad than data.max_bad_rows allows."""


class TooManyFaults(RunError):
    """More of a rollout's trajectories failed in the engine or the environment than `MAX_FAULTS` allows."""


def _is_fault(error: str) -> bool:
    return error.partition(": ")[0] in (ENGINE_FAULT, ENVIRONMENT_FAULT)


def check_faults(summaries: Sequence[GroupSummary]) -> str | None:
    """A line on the trajectories that failed in the engine or the environment, with the most frequent reasons; None without any.

    Raises:
        TooManyFaults: they are more than `MAX_FAULTS` of all.
    """
    errors = [error for summary in summaries for error in summary.errors]
    faults = [error for error in errors if error and _is_fault(error)]
    faults += [fault for summary in summaries for fault in summary.penalized]
    if not faults:
        return None
    line = f"{len(faults)} of {len(errors)} trajectories failed, by no fault of their rows: {_frequent(faults)}"
    if len(faults) > MAX_FAULTS * len(errors):
        raise TooManyFaults(
            f"{line}. That is more than half of the rollout. If requests are not answered in time, raise "
            "rollout.request_timeout or lower rollout.max_running_requests; an error of the environment is one of the code "
            "behind rollout.env_class, or of a reward function"
        )
    return line


class NoVerdicts(RunError):
    """Not one answer of a rollout has the verdicts of all reward functions."""


def no_verdicts(summaries: Sequence[GroupSummary]) -> str | None:
    """A line on the answers that reward functions came to no verdict on, with the most frequent reasons; None without any.

    Raises:
        NoVerdicts: these are all answers. What fails always is a mistake in a function, and nothing is learned from it.
    """
    reasons = [reason for summary in summaries for reason in summary.ungraded]
    if not reasons:
        return None
    n = sum(len(summary.errors) for summary in summaries)
    line = (
        f"{len(reasons)} of {n} answers have no verdict of a reward function, which then scores 0: {_frequent(reasons)}"
    )
    if len(reasons) == sum(error is None for summary in summaries for error in summary.errors):
        raise NoVerdicts(
            f"{line}. So it is with every answer: mend the function (its traceback stands in the log), leave it out of "
            "reward.functions, or raise reward.timeout if it needs longer"
        )
    return line


def _frequent(reasons: Sequence[str]) -> str:
    frequent = Counter(shorten(reason, 3 * SHOWN) for reason in reasons).most_common(3)
    return "; ".join(f"{n} × {reason}" for reason, n in frequent)


class BadRows:
    """The bad rows of a run: in memory, and in the file as {step, split, kind, id, reason}, one line a row.

    A run that resumes reads from the file which rows went bad in training (step 1 and later); it looks again for those that are
    bad before training.
    """

    def __init__(self, run_dir: Path, max_fraction: float, totals: Mapping[str, int]) -> None:
        """`max_fraction`: data.max_bad_rows; `totals`: rows of each split that are looked at."""
        self.path = run_dir / FILE
        self._max_fraction = max_fraction
        self._totals = dict(totals)
        self._rows: dict[str, dict[str, BadRow]] = {split: {} for split in totals}
        self._file = LineFile(self.path, durable=True)
        known = read_lines(self.path)[0] if self.path.exists() else []
        known = [row for row in known if row.get("step", 0) > 0 and row.get("split") in self._rows]
        if self.path.exists():
            self._file.keep(known)
        for row in known:
            self._rows[row["split"]][row["id"]] = BadRow(row["kind"], row["id"], row["reason"])

    def add(self, split: str, rows: Iterable[BadRow], step: int = 0) -> None:
        """Record rows found at `step` (0: before training), on the disk when this returns unless that is full. A known row keeps its
        first reason."""
        new = {row.id: row for row in rows if row.id not in self._rows[split]}
        self._rows[split] |= new
        if new:
            self._file.append(*({"step": step, "split": split, **asdict(row)} for row in new.values()))

    def add_failed(self, split: str, summaries: Sequence[GroupSummary], step: int) -> None:
        """Record the rows of groups that have an error, "kind: reason", of the row's own."""
        failed = []
        for summary in summaries:
            own = [error for error in summary.errors if error and not _is_fault(error)]
            if own:
                kind, _, reason = own[0].partition(": ")
                failed.append(BadRow(kind, summary.problem_id, reason or own[0]))
        self.add(split, failed, step)

    def counts(self) -> dict[str, int]:
        """Bad rows by split."""
        return {split: len(rows) for split, rows in self._rows.items()}

    def table(self, split: str) -> str:
        """A line per kind of reason, the most frequent first: how many rows, and the first of them."""
        rows = self._rows[split].values()
        first = {row.kind: row for row in reversed(rows)}
        width = max(map(len, first), default=0)
        return "\n".join(
            f"{n:6}  {kind:{width}}  {first[kind].id}: {shorten(first[kind].reason, SHOWN)}"
            for kind, n in Counter(row.kind for row in rows).most_common()
        )

    def check(self) -> None:
        """Raise `TooManyBadRows`, with the table, where more rows of a split are bad than `max_fraction` of them."""
        for split, n in self.counts().items():
            total = self._totals[split]
            if n and n / total > self._max_fraction:
                raise TooManyBadRows(
                    f"data.max_bad_rows: {n} of the {total} rows of {split} are bad ({n / total:.1%}), more than "
                    f"{self._max_fraction:g} allows:\n{self.table(split)}\nEvery row and its reason is in {self.path}. Repair "
                    "these rows or leave them out of the data, or raise data.max_bad_rows if training without them is right."
                )
