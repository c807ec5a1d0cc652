"""wandb and trackio: two processes write to one run, the controller scalars, the recorder samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlinf_vl.observe.samples import FACTS, TEXTS, Sample, inert
from rlinf_vl.observe.tracker import TrackedRun, Tracker, import_backend

#: File in the run's folder with the id of its wandb run.
WANDB_ID = "wandb_id"


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
    wandb = import_backend("wandb")
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
    trackio = import_backend("trackio")
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
