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

import numpy as np

from rlinf_vl.config.schema.runner import TRACKERS
from rlinf_vl.errors import pip_install
from rlinf_vl.observe.lines import StepLines
from rlinf_vl.observe.samples import FACTS, TEXTS, Sample, choose_samples, code_block, inert
from rlinf_vl.user_code import load_code

logger = logging.getLogger(__name__)

#: Calls that may wait for a tracker; further ones are dropped.
MOST_CALLS = 1000
#: Seconds that trackers have at the end of a run to finish their waiting calls.
CLOSE_S = 30.0
#: File in the run's folder with the id of its wandb run.
WANDB_ID = "wandb_id"


class TensorBoardTracker:
    """Event files in `folder`.

    TensorBoard reads only the newest file of a folder, so scalars and samples need one each. Where
    a run goes back to a step, its later records are hidden.

    Args:
        first_step: hide the records of an earlier process from this step on; None: from the first
            step that is logged.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        self._folder = folder
        self._first_step = first_step
        self._step = 0
        self._writer: Any = None

    def _writer_at(self, step: int) -> Any:
        """Return the writer for records of this step."""
        # Steps only grow within a file; TensorBoard hides later steps only at the start of a new
        # one.
        if self._writer is None or step < self._step:
            from torch.utils.tensorboard import SummaryWriter  # a second of imports

            purge_step = step if self._writer or self._first_step is None else self._first_step
            self.close()
            self._wait_for_later_name()
            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
        self._step = step
        return self._writer

    def _wait_for_later_name(self) -> None:
        """Wait until the second in which the newest file was begun is over.

        TensorBoard reads a folder's files by name. Files of one second differ by a number that it
        sorts as text (10 before 9), so the file that hides later steps could be read first.
        """
        seconds = (path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*"))
        newest = max((int(second) for second in seconds if second.isdigit()), default=0)
        time_s = time.time()
        if newest <= time_s < newest + 1:
            time.sleep(newest + 1 - time_s)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                self._writer_at(step).add_scalar(name, float(value), step)
            self._writer_at(step).flush()
        except OSError:  # the disk was full: this writer writes no more
            self._writer, self._first_step = None, None
            raise

    def log_samples(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        for i, sample in enumerate(samples):
            values = {name: value for name, value in sample.values.items() if value is not None}
            facts = " · ".join(f"{name}: {values[name]}" for name in FACTS if name in values)
            parts = {"facts": facts} | {name: str(values[name]) for name in TEXTS if name in values}
            text = "\n\n".join(f"**{name}**\n\n{code_block(part)}" for name, part in parts.items())
            self._writer_at(step).add_text(f"{split}/{i}", text, step)
            if sample.picture is not None:
                self._writer_at(step).add_image(
                    f"{split}/{i}", np.asarray(sample.picture), step, dataformats="HWC"
                )
        self._writer_at(step).flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class HostedTracker:
    """A run of wandb or trackio, which have the same names for things; `log_values` logs values by
    name at a step."""

    def __init__(
        self, backend: Any, run: Any, log_values: Callable[[dict[str, Any], int], None]
    ) -> None:
        self._backend = backend
        self._run = run
        self._log_values = log_values

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log_values(dict(metrics), step)

    def log_samples(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        rows = [
            [s.picture and self._backend.Image(s.picture), *map(inert, s.values.values())]
            for s in samples
        ]
        table = self._backend.Table(columns=["images", *FACTS, *TEXTS], data=rows)
        self._log_values({f"samples/{split}": table}, step)

    def close(self) -> None:
        self._run.finish()


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


def open_tensorboard(run: TrackedRun) -> Tracker:
    if run.config is None:
        return TensorBoardTracker(run.folder / "tensorboard" / "samples")
    return TensorBoardTracker(run.folder / "tensorboard", run.resume_step + 1)


def open_wandb(run: TrackedRun) -> Tracker:
    """Open a wandb run that several processes may write to, one of them primary.

    Online it uses wandb's shared mode, offline each process has one folder, which `wandb sync`
    joins by the run's id. No process knows the others' steps, so each logs its own as "step".

    Raises:
        FileNotFoundError: the primary process has not begun the run.
    """
    primary = run.config is not None
    id_file = run.folder / WANDB_ID
    run_id = (
        id_file.read_text().strip() if not primary or (run.resumed and id_file.exists()) else None
    )
    wandb = _import_backend("wandb")
    settings: dict[str, Any] = {} if primary else {"x_disable_stats": True, "console": "off"}
    # Unless WANDB_MODE or `wandb offline` say otherwise.
    if wandb.setup().settings.mode == "online":
        label = "trainer" if primary else "samples"
        settings |= {
            "mode": "shared",
            "x_label": label,
            "x_primary": primary,
            "x_update_finish_state": primary,
        }
    wandb_run = wandb.init(
        project=run.project_name,
        name=run.experiment_name,
        dir=str(run.folder),
        config=run.config,
        id=run_id,
        resume="allow" if run_id else None,
        settings=wandb.Settings(**settings),
    )
    wandb_run.define_metric("*", step_metric="step")
    id_file.write_text(wandb_run.id)
    return HostedTracker(
        wandb, wandb_run, lambda values, step: wandb_run.log(values | {"step": step})
    )


def open_trackio(run: TrackedRun) -> Tracker:
    """Open a trackio run: in trackio's own local folder, or at `TRACKIO_SPACE_ID` or
    `TRACKIO_SERVER_URL`."""
    trackio = _import_backend("trackio")
    settings = (
        {"auto_log_cpu": False, "auto_log_gpu": False}
        if run.config is None
        else {"config": run.config}
    )
    resume = "allow" if run.resumed else "never"
    trackio_run = trackio.init(
        project=run.project_name, name=run.experiment_name, resume=resume, **settings
    )
    if run.config is not None:
        # An empty line registers the run, so that the samples' process finds it by its name.
        trackio_run.log({}, step=max(0, run.resume_step))
    return HostedTracker(
        trackio, trackio_run, lambda values, step: trackio_run.log(values, step=step)
    )


#: Name in runner.logger.logger_backends → the function that opens the tracker.
OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}


def _opener(name: str, files: Mapping[str, str] | None) -> Callable[[TrackedRun], Tracker]:
    return OPENERS.get(name) or load_code(
        name, {}, files or {}, kind=TRACKERS.kind, signature=TRACKERS.signature
    )


def _import_backend(name: str) -> Any:
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
        _import_backend(backend)
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
