"""The log of a run, by step: metrics, ledger, events, trajectories, spans, progress."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.protocols import StepProgress
from rlinf_vl.controller.recorder import Recorder, Writer
from rlinf_vl.observe.alarms import OVER, REPLAYED, Alarms
from rlinf_vl.observe.lines import EventLog, StepLines
from rlinf_vl.observe.replay_file import replay_path
from rlinf_vl.observe.spans import flush_spans, span
from rlinf_vl.observe.tracker import Trackers, make_trackers
from rlinf_vl.runtime.files import read_lines
from rlinf_vl.runtime.run_folder import read_prior
from rlinf_vl.types import GroupSummary, Reference, TurnAdvantages

logger = logging.getLogger(__name__)

#: Groups that are recorded of a step that can't be trained.
FAILED_GROUPS = 4
#: Seconds for which the last lines of a run are tried again if the disk is full.
CLOSE_S = 30.0


class RunLog:
    """The log of a run. `open` it at a step, then per step: `begin_step`, any number of `timed` and
    `event`, `end_step`."""

    ledger: StepLines  #: from `open` on
    _alarms: Alarms  # from `open` on

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        start_writer: Callable[[], Writer],
        progress: StepProgress,
    ) -> None:
        #: The step of the events from now on: the one that is being trained.
        self.step = 0
        #: Seconds by `time/<phase>`, of this step so far.
        self.timings: dict[str, float] = {}
        self.progress = progress
        self.recorder = Recorder(config.runner, start_writer, report=self.event)
        self._config = config
        self._run_dir = run_dir
        self._events = EventLog(run_dir)
        self._trackers = Trackers({})  # none before `open`
        self._opened = False
        #: Restarts of the ranks and turnover of the pool when all processes were last shown alive.
        self._shown_workers: tuple[int, int] | None = None

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        while True:
            try:
                self.flush()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    logger.error("the last lines of %s are lost: %s", self._run_dir, error)
                    break
                time.sleep(1)
        self._trackers.close()
        flush_spans()
        if counts := self._events.summary():
            logger.info("beside its steps: %s (%s)", counts, self._run_dir / "events.jsonl")

    def open(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Continue after `step`, whose metrics are logged unless they were; drop the records of
        later steps."""
        self._trackers.close()
        # A run that goes back to its start validates again, and so logs step 0 once more.
        resume_step = step or -1
        self.step = step
        self.recorder.drop_after(resume_step)
        self.ledger = StepLines(self._run_dir / "ledger.jsonl", resume_step)
        self._trackers = make_trackers(
            self._run_dir,
            self._config.runner.logger.logger_backends,
            project_name=self._config.runner.logger.project_name,
            experiment_name=self._config.runner.experiment_name,
            config=asdict(self._config),
            resume_step=resume_step,
            files=self._config.runner.code_files,
        )
        distillation = self._config.algorithm.distillation
        # A policy that learns from a teacher alone may tie in every group: that is no alarm.
        learns_from_rewards = not distillation.labels_by_path or distillation.reward_weight > 0
        groups = self._config.data.rollout_batch_size if learns_from_rewards else None
        self._alarms = Alarms(
            groups, read_lines(self._run_dir / "metrics.jsonl")[0], read_prior(self._run_dir)
        )
        if metrics and self.last_step != step:
            self._trackers.log(step, metrics)
        self.progress.begin(total_steps, step)
        self._opened = True

    def flush(self) -> None:
        """Write the lines of ledger and metrics that the disk has refused; OSError if it still
        does."""
        self._trackers.flush()
        if self._opened:
            self.ledger.flush()

    @property
    def last_step(self) -> int | None:
        """The last step whose metrics are logged; None before the first one."""
        return self._trackers.last_step

    def begin_step(self, step: int) -> None:
        self.step = step
        self.timings = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Show a phase of the step while it lasts, and store its seconds as `time/<phase>` in
        `timings`."""
        start = time.perf_counter()
        self.progress.phase(phase)
        with span(phase, step=self.step):
            yield
        self.timings[f"time/{phase}"] = time.perf_counter() - start

    def event(self, kind: str, message: str, level: int = logging.WARNING) -> None:
        self._events.add(self.step, kind, message, level)

    def count(self, kind: str) -> int:
        """Return the number of events of this kind since this process began."""
        return self._events.count(kind)

    def end_step(self, step: int, metrics: Mapping[str, float]) -> list[GroupSummary]:
        """Log the step's metrics, and start writing its trajectories; returns groups that are
        written: release them."""
        self._trackers.log(step, metrics)
        reason = ""
        if step:
            for kind, message in self._alarms.check(metrics):
                is_over = kind.endswith(OVER)
                self.event(kind, message, logging.INFO if is_over else logging.WARNING)
                if kind in REPLAYED and not reason:
                    reason = f"an alarm began, {kind.replace('_', ' ')}: {message}"
            self.progress.update(step, metrics, self._alarms.active)
        return self._end_recording(step, reason)

    def record_failure(
        self,
        step: int,
        summaries: Sequence[GroupSummary],
        groups: Sequence[Reference],
        advantages: Sequence[Sequence[TurnAdvantages]],
        scored: Collection[int],
        error: BaseException,
    ) -> list[GroupSummary]:
        """Write groups of a step that can't be trained, the whole file and one for `rlinf-vl
        replay`; returns all groups of the step: release them.

        Written are the groups whose numbers the mismatch guard has `scored`, or else the first.
        """
        chosen = sorted(g for g in scored if g < len(groups)) or list(range(len(groups)))
        chosen = chosen[:FAILED_GROUPS]
        self.recorder.record("train", step, summaries, groups, chosen, advantages)
        self._end_recording(step, f"the run could not go on: {error}")
        self.recorder.close()
        return list(summaries)

    def _end_recording(self, step: int, replay_reason: str) -> list[GroupSummary]:
        """Start writing the step's records; with a reason, its replay file, too."""
        if replay_reason and self.recorder.records(step):
            path = replay_path(self._run_dir, step)
            hint = f"see where engine and trainer part: rlinf-vl replay {path}"
            self.event("replay_written", hint, logging.INFO)
        return self.recorder.end_step(step, replay_reason)

    def show_workers(self, learner: Any, pool: Any) -> None:
        """Write every process of the run to the status file, if any was replaced, joined or left
        since the last call, or was not alive then."""
        # Read before the entries: a change in between is then shown by the next call.
        restarts, turnover = self.count("actors_restarted"), pool.turnover
        if (restarts, turnover) != self._shown_workers:
            entries = [*learner.entries(restarts), *pool.entries()]
            all_alive = all(entry["state"] == "alive" for entry in entries)
            self._shown_workers = (restarts, turnover) if all_alive else None
            self.progress.workers(entries)
