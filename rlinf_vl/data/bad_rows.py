"""Rows that can't be used, as a record (`bad_rows.jsonl` of the run folder), as a table of reasons, and as a limit.

Found before training (`FilterResult.bad`) or in it (groups of which a trajectory failed); each counts once. Faults of the
engine and of the environment are not the row's: `check_faults` describes and limits them.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rlinf_vl.data.dataset import BadRow
from rlinf_vl.errors import RunError
from rlinf_vl.observe.lines import read_steps
from rlinf_vl.types import ENGINE_FAULT, ENVIRONMENT_FAULT, GroupSummary

FILE = "bad_rows.jsonl"
SHOWN = 100
"""Characters of a reason that the table shows."""
MAX_FAULTS = 0.5
"""Share of the trajectories of one rollout that may fail in the engine or the environment."""


class TooManyBadRows(RunError):
    """More of a split's rows are bad than data.max_bad_rows allows."""


class TooManyFaults(RunError):
    """More of a rollout's trajectories failed in the engine or the environment than `MAX_FAULTS` allows."""


def check_faults(summaries: Sequence[GroupSummary]) -> str | None:
    """A line on the trajectories that failed in the engine or the environment, each reason with its number; None without any.

    Raises:
        TooManyFaults: they are more than `MAX_FAULTS` of all.
    """
    errors = [error for summary in summaries for error in summary.errors]
    faults = [e for e in errors if e is not None and e.partition(": ")[0] in (ENGINE_FAULT, ENVIRONMENT_FAULT)]
    if not faults:
        return None
    reasons = Counter(fault if len(fault) <= 3 * SHOWN else fault[: 3 * SHOWN - 1] + "…" for fault in faults)
    told = f"{len(faults)} of {len(errors)} trajectories failed, by no fault of their rows: " + "; ".join(
        f"{n} × {reason}" for reason, n in reasons.most_common(3)
    )
    if len(faults) > MAX_FAULTS * len(errors):
        raise TooManyFaults(
            f"{told}. That is more than half of the rollout. If requests are not answered in time, raise "
            "rollout.request_timeout or lower rollout.max_running_requests; an error of the environment is one of the code "
            "behind rollout.env_class"
        )
    return told


class BadRows:
    """The bad rows of a run: in memory, and in the file as {step, split, kind, id, reason}, one line a row.

    Args:
        max_fraction: data.max_bad_rows.
        totals: split → rows that are looked at.

    What the file says of rows that went bad in training (step 1 and later) is kept by a run that resumes; those found before
    it are looked for again.
    """

    def __init__(self, run_dir: Path, max_fraction: float, totals: Mapping[str, int]) -> None:
        self.path, self._max_fraction, self._totals = run_dir / FILE, max_fraction, dict(totals)
        self._rows: dict[str, dict[str, BadRow]] = {split: {} for split in totals}
        if self.path.exists():
            scratch = self.path.with_name(f"{FILE}.tmp")
            scratch.unlink(missing_ok=True)
            rows = [row for row in read_steps(self.path) if row["step"] > 0 and row.get("split") in self._rows]
            for row in rows:
                self._rows[row["split"]][row["id"]] = BadRow(row["kind"], row["id"], row["reason"])
            _append(scratch, rows)
            os.replace(scratch, self.path)

    def add(self, split: str, rows: Iterable[BadRow], step: int = 0) -> None:
        """Record rows found at `step` (0: before training). One that is known keeps its first reason. When this returns,
        the lines are on the disk."""
        new = {row.id: row for row in rows if row.id not in self._rows[split]}
        self._rows[split] |= new
        if new:
            _append(self.path, [{"step": step, "split": split, **asdict(row)} for row in new.values()])

    def add_failed(self, split: str, summaries: Sequence[GroupSummary], step: int) -> None:
        """Record the rows of groups that have an error, "kind: reason", of the row's own."""
        failed = []
        for summary in summaries:
            for error in filter(None, summary.errors):
                kind, _, reason = error.partition(": ")
                if kind not in (ENGINE_FAULT, ENVIRONMENT_FAULT):
                    failed.append(BadRow(kind, summary.problem_id, reason or error))
                    break
        self.add(split, failed, step)

    def counts(self) -> dict[str, int]:
        """Bad rows by split."""
        return {split: len(rows) for split, rows in self._rows.items()}

    def table(self, split: str) -> str:
        """A line per kind of reason, the most frequent first: how many rows, and the first of them. No rows: an empty text."""
        kinds: defaultdict[str, list[BadRow]] = defaultdict(list)
        for row in self._rows[split].values():
            kinds[row.kind].append(row)
        width = max(map(len, kinds), default=0)
        lines = []
        for kind, rows in sorted(kinds.items(), key=lambda item: -len(item[1])):
            reason = rows[0].reason if len(rows[0].reason) <= SHOWN else rows[0].reason[: SHOWN - 1] + "…"
            lines.append(f"{len(rows):6}  {kind:{width}}  {rows[0].id}: {reason}")
        return "\n".join(lines)

    def check(self) -> None:
        """
        Raises:
            TooManyBadRows: more rows of a split are bad than `max_fraction` of them; with its table.
        """
        for split, n in self.counts().items():
            total = self._totals[split]
            if n and n / total > self._max_fraction:
                raise TooManyBadRows(
                    f"data.max_bad_rows: {n} of the {total} rows of {split} are bad ({n / total:.1%}), more than "
                    f"{self._max_fraction:g} allows:\n{self.table(split)}\nEvery row and its reason is in {self.path}. Repair "
                    "these rows or leave them out of the data, or raise data.max_bad_rows if training without them is right."
                )


def _append(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())
