"""Where a step's scalars go: metrics.jsonl always, TensorBoard, wandb and trackio on request."""

import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlinf_vl.observe.lines import StepLines

logger = logging.getLogger(__name__)

TRACKER_BACKENDS = ("tensorboard", "wandb", "trackio")
#: In the run's folder: the id of its wandb run.
WANDB_ID = "wandb_id"


class Tracker(Protocol):
    """Takes the scalars of one step, once per step, in growing order of steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the scalars of one step, by their full names."""
        ...

    def close(self) -> None:
        """Write out what is held; nothing is logged after it."""
        ...


class JsonlTracker:
    """`metrics.jsonl`: the scalars of each step by name, sorted (`StepLines`). NaN and infinities are written as null, so
    every line is valid JSON.

    Raises:
        ValueError: (`log`) a step not after the last one, or a metric called `step`.
    """

    def __init__(self, path: str | Path, resume_step: int = -1) -> None:
        self._lines = StepLines(path, resume_step)

    @property
    def last_step(self) -> int | None:
        return self._lines.last_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "step" in metrics:
            raise ValueError("a metric can't be called 'step'")
        self._lines.append(step, {name: _json_number(metrics[name]) for name in sorted(metrics)})

    def close(self) -> None:
        self._lines.close()


class TensorBoardTracker:
    """TensorBoard event files in `folder`; after a resume, TensorBoard hides what was written past `resume_step`."""

    def __init__(self, folder: str | Path, resume_step: int = -1) -> None:
        # A second of imports that only this tracker needs.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Its id is kept in `run_dir/wandb_id`, so that a resumed run goes on in the same one.

    Raises:
        ImportError: wandb isn't installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        resumed: bool,
    ) -> None:
        id_file = Path(run_dir) / WANDB_ID
        self._run = open_wandb(
            run_dir,
            project_name=project_name,
            experiment_name=experiment_name,
            config=dict(config),
            run_id=id_file.read_text().strip() if resumed and id_file.exists() else None,
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


def open_wandb(
    run_dir: str | Path,
    *,
    project_name: str,
    experiment_name: str,
    run_id: str | None,
    config: dict[str, Any] | None = None,
    primary: bool = True,
) -> Any:
    """A wandb run to which several processes may write, all but one of them not `primary`: online in wandb's shared mode,
    offline as one folder each, which `wandb sync` joins by `run_id`. Neither knows the steps of the others, so what is
    logged says its own, as "step".

    Raises:
        ImportError: wandb isn't installed.
    """
    wandb = import_backend("wandb")
    settings: dict[str, Any] = {} if primary else {"x_disable_stats": True, "console": "off"}
    if wandb.setup().settings.mode == "online":  # neither WANDB_MODE nor `wandb offline` wants it otherwise
        label = "trainer" if primary else "samples"
        settings |= {"mode": "shared", "x_label": label, "x_primary": primary, "x_update_finish_state": primary}
    run = wandb.init(
        project=project_name,
        name=experiment_name,
        dir=str(run_dir),
        config=config,
        id=run_id,
        resume="allow" if run_id else None,
        settings=wandb.Settings(**settings),
    )
    run.define_metric("*", step_metric="step")
    return run


class TrackioTracker:
    """A trackio run: in trackio's own local folder, or where `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says.

    Raises:
        ImportError: trackio isn't installed.
    """

    def __init__(
        self, *, project_name: str, experiment_name: str, config: Mapping[str, Any], step: int, resumed: bool
    ) -> None:
        resume = "allow" if resumed else "never"
        self._run = import_backend("trackio").init(
            project=project_name, name=experiment_name, config=dict(config), resume=resume
        )
        self._run.log({}, step=step)  # from now on another process finds it by its name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def import_backend(name: str) -> Any:
    """A tracker's module; they are optional, and slow to import.

    Raises:
        ImportError: it isn't installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"runner.logger.logger_backends has {name}, which isn't installed: run `pip install {name}` or take it out"
        ) from error


def check_backends(backends: Sequence[str]) -> None:
    """Raises ValueError for one that isn't among `TRACKER_BACKENDS`."""
    for backend in backends:
        if backend not in TRACKER_BACKENDS:
            raise ValueError(
                f"runner.logger.logger_backends: {backend!r} is unknown; known are {', '.join(TRACKER_BACKENDS)} "
                "(metrics.jsonl is always written)"
            )


class Trackers:
    """Several trackers as one. One that fails, other than metrics.jsonl, warns once and never stops training."""

    def __init__(self, trackers: Sequence[Tracker], last_step: int | None = None) -> None:
        """`last_step`: the last step that they have."""
        self._trackers, self.last_step = list(trackers), last_step
        self._warned: set[int] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            self._call(tracker, "log", step, metrics)
        self.last_step = step

    def close(self) -> None:
        for tracker in self._trackers:
            self._call(tracker, "close")

    def _call(self, tracker: Tracker, method: str, *args: Any) -> None:
        try:
            getattr(tracker, method)(*args)
        except Exception as error:
            if isinstance(tracker, JsonlTracker):
                raise
            if id(tracker) not in self._warned:
                self._warned.add(id(tracker))
                logger.warning("%s failed (%r); training goes on", type(tracker).__name__, error)


def make_trackers(
    run_dir: str | Path,
    backends: Sequence[str],
    *,
    project_name: str,
    experiment_name: str,
    config: Mapping[str, Any],
    resume_step: int = -1,
) -> Trackers:
    """`run_dir/metrics.jsonl`, and what `backends` names beside it.

    Args:
        backends: out of `TRACKER_BACKENDS`.
        config: the resolved configuration, as plain containers, for trackers that show it.
        resume_step: the step of the checkpoint the run goes on from; -1: none. Whether a tracker goes on in a run of its own
            is told by the folder: it has a metrics.jsonl then.

    Raises:
        ValueError: an unknown backend.
        ImportError: a backend isn't installed. Anything else that keeps a backend from starting is a warning.
    """
    check_backends(backends)
    run_dir = Path(run_dir)
    resumed = (run_dir / "metrics.jsonl").exists()
    jsonl = JsonlTracker(run_dir / "metrics.jsonl", resume_step)
    trackers: list[Tracker] = [jsonl]
    names = {"project_name": project_name, "experiment_name": experiment_name}
    for backend in dict.fromkeys(backends):
        try:
            if backend == "tensorboard":
                trackers.append(TensorBoardTracker(run_dir / "tensorboard", resume_step))
            elif backend == "wandb":
                trackers.append(WandbTracker(run_dir, **names, config=config, resumed=resumed))
            else:
                trackers.append(TrackioTracker(**names, config=config, step=max(0, resume_step), resumed=resumed))
        except Exception as error:
            if isinstance(error, ImportError):
                raise
            logger.warning("tracker %s could not start (%r); training goes on without it", backend, error)
    return Trackers(trackers, jsonl.last_step)


def _json_number(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
