"""Recording trajectories: the choice of groups, and when these may be released. A `Writer` writes
them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlinf_vl.config.schema import RunnerConfig
from rlinf_vl.types import GroupSummary, Reference, TurnAdvantages

#: Seconds without recording after a writer has failed; doubled for each that fails right after it,
#: to an hour at most.
PAUSE_S, LONGEST_PAUSE_S = 10.0, 3600.0
#: Groups recorded of a training step and of a validation, unless `runner.trajectories.groups` is set.
GROUPS = {"train": 4, "val": 64}


#: As `rlinf_vl.controller.trajectory_writer.GroupBatch`, with references for groups and logprobs.
Batch = tuple[
    str, Mapping[int, Reference], Sequence[Sequence[TurnAdvantages]] | None, Sequence[Reference]
]


class Writer(Protocol):
    """A handle of a `TrajectoryWriter`, which runs one call at a time."""

    def begin(self, method: str, *arguments: Any) -> None:
        """Begin a call of the writer's method."""

    def result(self, timeout_s: float) -> Any:
        """Return the result of the call that was begun last. Raises what it raised."""

    def kill(self) -> None:
        """End the writer, whatever it is doing."""


class Recorder:
    """The loop's handle of the writer: `choose` groups, train, `record` them, `end_step`.

    Recorded groups must stay in the object store until they are written: `end_step` and `close`
    return those that may be released. A writer that fails is replaced; a failure never ends the
    run.
    """

    def __init__(
        self,
        runner: RunnerConfig,
        start_writer: Callable[[], Writer],
        report: Callable[[str, str], None],
    ) -> None:
        """`report` is called with the kind of event and a sentence."""
        self._start_writer = start_writer
        self._settings = runner.trajectories
        self._timeout = runner.heartbeat_timeout
        self._seed = runner.seed
        self._report = report
        self._pause = PAUSE_S
        #: When to start another writer, by `time.monotonic`; None: never.
        self._retry_at: float | None = None
        #: Batches of the steps that have not ended, and summaries of the groups in them, by step.
        self._batches: dict[int, list[Batch]] = {}
        self._groups: dict[int, list[GroupSummary]] = {}
        #: Weights before these steps, of a small model.
        self._weights: dict[int, Reference] = {}
        #: Whether nobody has waited for the writer's last call yet, and the groups that it reads.
        self._writing = False
        self._groups_in_call: list[GroupSummary] = []
        #: None where nothing is recorded, or no longer.
        self._writer: Writer | None = self._start_writer() if self._settings.max_gb > 0 else None

    def choose(self, split: str, step: int, n: int) -> list[int]:
        """Return the numbers of the groups to record, of `n` of this step; in a validation always
        the same."""
        if (
            self._writer is None
            and self._retry_at is not None
            and time.monotonic() > self._retry_at
        ):
            self._writer, self._retry_at = self._start_writer(), None
        if self._writer is None:
            return []
        n_recorded = GROUPS[split] if self._settings.groups is None else self._settings.groups
        if n_recorded < 0 or n_recorded >= n:
            return list(range(n))
        # Seeded by the step, so that a resumed run records the groups that it would have recorded.
        generator = random.Random(f"{self._seed} {split} {step * (split == 'train')}")
        return sorted(generator.sample(range(n), n_recorded))

    def keep_weights(self, step: int, weights: Callable[[], Reference]) -> None:
        """Keep the weights before a step until it ends: an alarm is judged when they are gone."""
        if self._writer is not None:
            self._weights[step] = weights()

    def record(
        self,
        split: str,
        step: int,
        summaries: Sequence[GroupSummary],
        groups: Sequence[Reference] | Mapping[int, Reference],
        chosen: Sequence[int],
        advantages: Sequence[Sequence[TurnAdvantages]] | None = None,
        logprobs: Sequence[Reference] = (),
    ) -> list[GroupSummary]:
        """Record the chosen groups in this step's file; returns the others: release them."""
        recorded = set(chosen)
        if chosen:
            self._batches.setdefault(step, []).append(
                (split, {g: groups[g] for g in chosen}, advantages, logprobs)
            )
            self._groups.setdefault(step, []).extend(summaries[g] for g in chosen)
        return [summary for g, summary in enumerate(summaries) if g not in recorded]

    def end_step(self, step: int, replay_reason: str = "") -> list[GroupSummary]:
        """Start writing the step's file, after that of the step before; returns the groups of the
        step before: release them. With a `replay_reason` the step's trained groups are written for
        `rlinf-vl replay`, too."""
        groups = self._groups.pop(step, [])
        batches = self._batches.pop(step, [])
        weights = self._weights.pop(step, {})
        replay = (replay_reason, weights) if replay_reason else ()
        return self._start("write", step, batches, *replay, groups=groups)

    def records(self, step: int) -> bool:
        """Return whether trained groups of this step will be written at its end."""
        is_train = any(split == "train" for split, *_ in self._batches.get(step, ()))
        return self._writer is not None and is_train

    def drop_after(self, step: int) -> None:
        """Drop the records of later steps than this one, those that have not ended included; -1:
        drop all."""
        self._batches, self._groups, self._weights = {}, {}, {}
        self._start("drop_after", step)

    def close(self) -> list[GroupSummary]:
        """Wait until everything is written, and end the writer; returns the last groups: release
        them."""
        read_groups = self._start("close")
        self._wait()
        self._writer = None
        return read_groups + [summary for groups in self._groups.values() for summary in groups]

    def _start(
        self, method: str, *arguments: Any, groups: Sequence[GroupSummary] = ()
    ) -> list[GroupSummary]:
        """Call the writer, which reads these groups, once it has answered the call before; returns
        the groups that it read in the call before."""
        self._wait()
        read_groups = self._groups_in_call
        self._groups_in_call = list(groups)
        if self._writer is not None:
            self._writer.begin(method, *arguments)
            self._writing = True
        return read_groups

    def _wait(self) -> None:
        writing, self._writing = self._writing, False
        if not writing or self._writer is None:
            return
        try:
            full = self._writer.result(self._timeout) is False
        except Exception as error:
            # The disk is full, or the process died or hangs: a run is worth more than its record.
            self._writer.kill()
            self._writer, self._retry_at = None, time.monotonic() + self._pause
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
            self._report(
                "recording_failed",
                f"no trajectories are recorded for {self._pause:.0f} s: {reason}",
            )
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
            return
        self._pause = PAUSE_S
        # No retry is due then: the limit holds for the rest of the run.
        if full:
            self._writer = None
            limit = f"runner.trajectories.max_gb: {self._settings.max_gb} GB of trajectories are recorded"
            self._report("recording_ended", f"no more trajectories are recorded: {limit}")
