"""Trackers: scalars of every step go to metrics.jsonl always, and with samples to TensorBoard,
wandb and trackio on request.

The controller logs scalars. The recorder's process logs samples: it joins the run that the
controller began with a tracker.
"""

import importlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol

from rlinf_vl.config.parts import named
from rlinf_vl.config.schema.runner import TRACKERS
from rlinf_vl.errors import pip_install
from rlinf_vl.observe.lines import StepLines
from rlinf_vl.observe.samples import Sample, choose_samples
from rlinf_vl.user_code import load_code

logger = logging.getLogger(__name__)

#: Calls that may wait for a tracker; further ones are dropped.
MOST_CALLS = 1000
#: Seconds that trackers have at the end of a run to finish their waiting calls.
CLOSE_S = 30.0


class Tracker(Protocol):
    """An experiment tracker of a run. Steps grow; an error that it raises becomes one warning."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the scalars of a step."""
        ...

    def log_samples(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        """Log some answers of a step; `split` is train or val."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for.

    Attributes:
        config: None in the process that logs samples and joins the other's run.
        resumed: continue the tracker's run that the run's folder names.
    """

    folder: Path
    project_name: str
    experiment_name: str
    config: dict[str, Any] | None = None
    resume_step: int = -1
    resumed: bool = True


#: Name in runner.logger.logger_backends → the function that opens the tracker, imported on demand.
OPENERS = {
    "tensorboard": "rlinf_vl.extras.trackers.tensorboard:open_tensorboard",
    "wandb": "rlinf_vl.extras.trackers.hosted:open_wandb",
    "trackio": "rlinf_vl.extras.trackers.hosted:open_trackio",
}


def _opener(name: str, files: Mapping[str, str] | None) -> Callable[[TrackedRun], Tracker]:
    if name in OPENERS:
        return named(OPENERS[name])
    return load_code(name, {}, files or {}, kind=TRACKERS.kind, signature=TRACKERS.signature)


def import_backend(name: str) -> Any:
    """Import the package of a tracker. Raises ImportError, with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"runner.logger.logger_backends has {name}, which isn't installed: run "
            f"`{pip_install(name)}` or take it out"
        ) from error


class _Lane:
    """A tracker in a thread of its own, opened and called there in order: one that hangs holds up
    nobody."""

    def __init__(self, name: str, opener: Callable[[], Tracker]) -> None:
        self._name = name
        self._opener = opener
        self._calls: Queue[tuple[str, tuple[Any, ...]]] = Queue(MOST_CALLS)
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def call(self, method: str, args: tuple[Any, ...] = ()) -> None:
        """Enqueue a call of the tracker's method; if too many wait, drop it and warn."""
        try:
            self._calls.put_nowait((method, args))
        except Full:
            self._warn(f"is {MOST_CALLS} calls behind; steps are missing there")

    def close(self, deadline: float) -> None:
        self.call("close")
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(
                f"has not ended within {CLOSE_S:g} s; what it has not shown by now is lost there"
            )

    def _run(self) -> None:
        tracker = None
        failed_to_open = False  # the queue is still emptied, or `call` would warn of it
        method = ""
        while method != "close":
            method, args = self._calls.get()
            try:
                if tracker is None and not failed_to_open and method != "close":
                    tracker = self._opener()
                if tracker is not None and method != "open":
                    getattr(tracker, method)(*args)
            except Exception as error:
                failed_to_open = tracker is None
                failure = "could not start" if failed_to_open else "failed"
                self._warn(f"{failure} ({error!r}); training goes on without it")

    def _warn(self, message: str) -> None:
        if not self._warned:
            logger.warning("tracker %s %s", self._name, message)
        self._warned = True


class Trackers:
    """Several trackers by name, and metrics.jsonl.

    A tracker that fails, hangs or is slow warns once, and never holds up training: each is called
    in a thread of its own.

    Args:
        openers: open each tracker when something is first logged, or by `open`. One that can't be
            opened is skipped.
        metrics: metrics.jsonl; None where only samples are logged.
    """

    def __init__(
        self, openers: Mapping[str, Callable[[], Tracker]], metrics: StepLines | None = None
    ) -> None:
        self._lanes = [_Lane(name, opener) for name, opener in openers.items()]
        self._metrics = metrics

    @property
    def last_step(self) -> int | None:
        """Return the last step in metrics.jsonl."""
        return self._metrics.last_step if self._metrics else None

    def open(self) -> None:
        """Open the trackers, each in its thread."""
        self._call("open")

    def flush(self) -> None:
        """Write the lines of metrics.jsonl that the disk has refused; OSError if it still does."""
        if self._metrics:
            self._metrics.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the scalars of a step. metrics.jsonl gets them sorted; NaN and infinities are null
        there.

        Raises:
            ValueError: a step not after the last one, or a metric called `step`.
        """
        if "step" in metrics:
            raise ValueError("a metric can't be called 'step'")
        if self._metrics:
            numbers = {
                name: x if isinstance(x, int) else float(x) for name, x in sorted(metrics.items())
            }
            # JSON has no word for NaN and infinities
            self._metrics.append(
                step, {name: x if math.isfinite(x) else None for name, x in numbers.items()}
            )
        self._call("log", step, metrics)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log some of these rows, which have the keys split, images (encoded bytes) and those in
        `FACTS` and `TEXTS`."""
        for split in dict.fromkeys(row["split"] for row in rows) if self._lanes else ():
            samples = choose_samples([row for row in rows if row["split"] == split])
            self._call("log_samples", step, split, samples)

    def close(self) -> None:
        """Wait until the trackers have finished their calls, for `CLOSE_S` seconds at most."""
        deadline = time.monotonic() + CLOSE_S
        for lane in self._lanes:
            lane.close(deadline)
        self._lanes = []

    def _call(self, method: str, *args: Any) -> None:
        for lane in self._lanes:
            lane.call(method, args)


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the paths of users' files and without their texts, which may be
    secret."""
    runner = config.get("runner") or {}
    paths = dict.fromkeys(runner.get("code_files") or {}, "left out: it may be secret")
    return {**config, "runner": {**runner, "code_files": paths}} if paths else dict(config)


def make_trackers(
    run_dir: str | Path,
    backends: Sequence[str],
    *,
    project_name: str,
    experiment_name: str,
    config: Mapping[str, Any] | None = None,
    resume_step: int = -1,
    files: Mapping[str, str] | None = None,
) -> Trackers:
    """Return the trackers that `backends` names (keys of `OPENERS`, or code), and metrics.jsonl
    where scalars are logged.

    Args:
        config: the resolved configuration, as plain containers, for trackers that show it. None:
            log samples only; each tracker joins the run of the scalars' tracker when samples are
            first logged.
        resume_step: the step of the checkpoint that the run resumes from; -1: none. wandb and
            trackio continue their run of this folder if it has a metrics.jsonl.
        files: runner.code_files.

    Raises:
        ImportError: a backend isn't installed.
        CodeError: a name leads to no code. Anything else that keeps a backend from starting is a
            warning.
    """
    run_dir = Path(run_dir)
    if config is None:
        run = TrackedRun(run_dir, project_name, experiment_name)
        return Trackers({b: partial(_opener(b, files), run) for b in backends})
    for backend in {"wandb", "trackio"} & set(backends):
        import_backend(backend)
    metrics_file = run_dir / "metrics.jsonl"
    resumed = resume_step >= 0 and metrics_file.exists()
    run = TrackedRun(
        run_dir, project_name, experiment_name, without_code(config), resume_step, resumed
    )
    trackers = Trackers(
        {b: partial(_opener(b, files), run) for b in backends}, StepLines(metrics_file, resume_step)
    )
    trackers.open()
    return trackers
