"""Trackers: scalars of every step go to metrics.jsonl always, and with samples to TensorBoard, wandb and trackio on request.

The controller logs scalars, the recorder's process samples: it joins the run that the controller has begun with a tracker.
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

from rlinf_vl.code import load_code
from rlinf_vl.config.schema.runner import TRACKERS
from rlinf_vl.observe.lines import StepLines
from rlinf_vl.observe.samples import FACTS, TEXTS, Sample, choose_samples, code_block, inert

logger = logging.getLogger(__name__)

#: Calls that a tracker may be behind; further ones are not made.
MOST_CALLS = 1000
#: Seconds that trackers have, at the end of a run, for what they have not shown yet.
CLOSE_S = 30.0
WANDB_ID = "wandb_id"
"""File in the run's folder: the id of its wandb run."""


class TensorBoardTracker:
    """Event files in `folder`. TensorBoard reads only the newest file of a folder, so scalars and samples need one each.
    Where a run goes back to a step, what was written from there on is hidden.

    Args:
        first_step: hide what an earlier process wrote from this step on; None: from the first step that is logged.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        self._folder = folder
        self._first_step = first_step
        self._step = 0
        self._writer: Any = None

    def _at(self, step: int) -> Any:
        """The writer, for something of this step."""
        if self._writer is None or step < self._step:
            from torch.utils.tensorboard import SummaryWriter  # a second of imports

            purge_step = step if self._writer or self._first_step is None else self._first_step
            self.close()
            self._wait_for_a_later_name()
            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
        self._step = step
        return self._writer

    def _wait_for_a_later_name(self) -> None:
        """TensorBoard reads a folder's files by name; of those begun in one second, a number tells them apart that it sorts as
        text (10 before 9), so what hides later steps could be read first. Wait until the newest file's second is over."""
        seconds = (path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*"))
        newest = max((int(second) for second in seconds if second.isdigit()), default=0)
        if newest <= (now := time.time()) < newest + 1:
            time.sleep(newest + 1 - now)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                self._at(step).add_scalar(name, float(value), step)
            self._at(step).flush()
        except OSError:  # the disk was full: this writer writes no more
            self._writer, self._first_step = None, None
            raise

    def log_samples(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        for i, sample in enumerate(samples):
            known = {name: value for name, value in sample.values.items() if value is not None}
            facts = " · ".join(f"{name}: {known[name]}" for name in FACTS if name in known)
            parts = {"facts": facts} | {name: str(known[name]) for name in TEXTS if name in known}
            text = "\n\n".join(f"**{name}**\n\n{code_block(part)}" for name, part in parts.items())
            self._at(step).add_text(f"{split}/{i}", text, step)
            if sample.picture is not None:
                self._at(step).add_image(f"{split}/{i}", np.asarray(sample.picture), step, dataformats="HWC")
        self._at(step).flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class HostedTracker:
    """A run of wandb or trackio, which name things alike; `log_values` logs values by name at a step."""

    def __init__(self, backend: Any, run: Any, log_values: Callable[[dict[str, Any], int], None]) -> None:
        self._backend = backend
        self._run = run
        self._log_values = log_values

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log_values(dict(metrics), step)

    def log_samples(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        rows = [[s.picture and self._backend.Image(s.picture), *map(inert, s.values.values())] for s in samples]
        table = self._backend.Table(columns=["images", *FACTS, *TEXTS], data=rows)
        self._log_values({f"samples/{split}": table}, step)

    def close(self) -> None:
        self._run.finish()


class Tracker(Protocol):
    """What a run is shown on. Steps grow; what it raises is a warning, once."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The scalars of a step."""
        ...

    def log_samples(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        """Some answers of a step; `split` is train or val."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker of a run is opened with. `config` is None in the process that logs samples and joins the other's run;
    `resumed`: go on in what the run's folder names."""

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
    """A wandb run that several processes may write to, one of them primary: online in wandb's shared mode, offline as one
    folder each, which `wandb sync` joins by the run's id. None knows the others' steps, so each says its own, as "step".

    Raises:
        FileNotFoundError: the primary process has not begun the run.
    """
    primary, id_file = run.config is not None, run.folder / WANDB_ID
    run_id = id_file.read_text().strip() if not primary or (run.resumed and id_file.exists()) else None
    wandb = _import_backend("wandb")
    settings: dict[str, Any] = {} if primary else {"x_disable_stats": True, "console": "off"}
    if wandb.setup().settings.mode == "online":  # neither WANDB_MODE nor `wandb offline` wants it otherwise
        label = "trainer" if primary else "samples"
        settings |= {"mode": "shared", "x_label": label, "x_primary": primary, "x_update_finish_state": primary}
    opened = wandb.init(
        project=run.project_name,
        name=run.experiment_name,
        dir=str(run.folder),
        config=run.config,
        id=run_id,
        resume="allow" if run_id else None,
        settings=wandb.Settings(**settings),
    )
    opened.define_metric("*", step_metric="step")
    id_file.write_text(opened.id)
    return HostedTracker(wandb, opened, lambda values, step: opened.log(values | {"step": step}))


def open_trackio(run: TrackedRun) -> Tracker:
    """A trackio run: in trackio's own local folder, or where `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says."""
    trackio = _import_backend("trackio")
    joining = {"auto_log_cpu": False, "auto_log_gpu": False} if run.config is None else {"config": run.config}
    resume = "allow" if run.resumed else "never"
    opened = trackio.init(project=run.project_name, name=run.experiment_name, resume=resume, **joining)
    if run.config is not None:
        opened.log({}, step=max(0, run.resume_step))  # from now on another process finds it by its name
    return HostedTracker(trackio, opened, lambda values, step: opened.log(values, step=step))


OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}
"""runner.logger.logger_backends → how such a tracker is opened."""


def _opener(name: str, files: Mapping[str, str] | None) -> Callable[[TrackedRun], Tracker]:
    return OPENERS.get(name) or load_code(name, {}, files or {}, what=TRACKERS.what, signature=TRACKERS.signature)


def _import_backend(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"runner.logger.logger_backends has {name}, which isn't installed: run `pip install {name}` or take it out"
        ) from error


class _Lane:
    """A tracker in a thread of its own, opened and called there in turn: one that hangs holds up nobody."""

    def __init__(self, name: str, opener: Callable[[], Tracker]) -> None:
        self._name, self._opener = name, opener
        self._calls: Queue[tuple[str, tuple[Any, ...]]] = Queue(MOST_CALLS)
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def call(self, method: str, *args: Any) -> None:
        try:
            self._calls.put_nowait((method, args))
        except Full:
            self._warn(f"is {MOST_CALLS} calls behind; steps are missing there")

    def close(self, deadline: float) -> None:
        self.call("close")
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"has not ended within {CLOSE_S:g} s; what it has not shown by now is lost there")

    def _run(self) -> None:
        tracker, dead, method = None, False, ""
        while method != "close":
            method, args = self._calls.get()
            try:
                if tracker is None and not dead and method != "close":
                    tracker = self._opener()
                if tracker is not None and method != "open":
                    getattr(tracker, method)(*args)
            except Exception as error:
                dead = tracker is None
                about = "could not start" if dead else "failed"
                self._warn(f"{about} ({error!r}); training goes on without it")

    def _warn(self, what: str) -> None:
        if not self._warned:
            logger.warning("tracker %s %s", self._name, what)
        self._warned = True


class Trackers:
    """Several trackers by name, and metrics.jsonl. A tracker that fails, hangs or is slow warns once, and never holds up training:
    each is called in a thread of its own.

    Args:
        openers: each tracker is opened when something is first logged, or by `open`. One that can't be is left alone.
        metrics: metrics.jsonl; None where only samples are logged.
    """

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]], metrics: StepLines | None = None) -> None:
        self._lanes = [_Lane(name, opener) for name, opener in openers.items()]
        self._metrics = metrics

    @property
    def last_step(self) -> int | None:
        """The last step in metrics.jsonl."""
        return self._metrics.last_step if self._metrics else None

    def open(self) -> None:
        self._call("open")

    def flush(self) -> None:
        """Write the lines of metrics.jsonl that the disk has refused; OSError if it still does."""
        if self._metrics:
            self._metrics.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the scalars of a step. metrics.jsonl gets them sorted; NaN and infinities are null there.

        Raises:
            ValueError: a step not after the last one, or a metric called `step`.
        """
        if "step" in metrics:
            raise ValueError("a metric can't be called 'step'")
        if self._metrics:
            numbers = {name: x if isinstance(x, int) else float(x) for name, x in sorted(metrics.items())}
            self._metrics.append(step, {name: x if math.isfinite(x) else None for name, x in numbers.items()})
        self._call("log", step, metrics)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log some of these rows, which have the keys split, images (encoded bytes) and those in `FACTS` and `TEXTS`."""
        for split in dict.fromkeys(row["split"] for row in rows) if self._lanes else ():
            samples = choose_samples([row for row in rows if row["split"] == split])
            self._call("log_samples", step, split, samples)

    def close(self) -> None:
        """Wait until the trackers have shown everything, for `CLOSE_S` seconds at most."""
        deadline = time.monotonic() + CLOSE_S
        for lane in self._lanes:
            lane.close(deadline)
        self._lanes = []

    def _call(self, method: str, *args: Any) -> None:
        for lane in self._lanes:
            lane.call(method, *args)


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the paths of users' files and without their texts, which may be secret."""
    runner = config.get("runner") or {}
    paths = dict.fromkeys(runner.get("code_files") or {}, "left out: runner.logger.send_code is false")
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
    send_code: bool = False,
) -> Trackers:
    """The trackers that `backends` names (out of `OPENERS`, or code), and metrics.jsonl where scalars are logged.

    Args:
        files: runner.code_files. `send_code`: trackers get their texts, too, with the config.
        config: the resolved configuration, as plain containers, for trackers that show it. None: log samples only; each
            tracker joins what the scalars' tracker has begun when samples are first logged.
        resume_step: the step of the checkpoint that the run goes on from; -1: none. wandb and trackio go on in their run of this
            folder, which a folder with a metrics.jsonl has.

    Raises:
        ImportError: a backend isn't installed.
        CodeError: a name leads to no code. Anything else that keeps a backend from starting is a warning.
    """
    run_dir = Path(run_dir)
    if config is None:
        run = TrackedRun(run_dir, project_name, experiment_name)
        return Trackers({b: partial(_opener(b, files), run) for b in backends})
    for backend in {"wandb", "trackio"} & set(backends):
        _import_backend(backend)
    metrics_file = run_dir / "metrics.jsonl"
    resumed = resume_step >= 0 and metrics_file.exists()
    shown_config = dict(config) if send_code else without_code(config)
    run = TrackedRun(run_dir, project_name, experiment_name, shown_config, resume_step, resumed)
    trackers = Trackers({b: partial(_opener(b, files), run) for b in backends}, StepLines(metrics_file, resume_step))
    trackers.open()
    return trackers
