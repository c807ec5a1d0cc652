"""A training run: its pool answers, its learner trains, from the first step to the last."""

from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.loop import train
from rlinf_vl.driver.parts import Parts
from rlinf_vl.rollout.episode.env_makers import pays_row_answers
from rlinf_vl.runtime.checkpoints import Folder
from rlinf_vl.runtime.run_folder import write_baselines


def supervise(parts: Parts, start: Folder | None = None) -> dict[str, float]:
    """Train to the last step; returns its metrics.

    Args:
        parts: their `run_dir` holds this run's history only, up to the step of the checkpoint
            `start`.
        start: the checkpoint to resume from; None: begin with the model in `parts.model_path`.

    Raises:
        Interrupted: the run was asked to stop, and has written a checkpoint.
        RunError: the run can't go on; see `train`.
    """
    config = parts.config
    parts.progress.phase("starting engines and actor ranks")
    pool = parts.start_pool()
    parts.begin_learner()
    data = find_usable_rows(config, parts.run_dir, pool, parts.progress)
    if pays_row_answers(config):
        write_baselines(parts.run_dir, data.answers)
    pool.open_membership()

    def run() -> dict[str, float]:
        return train(
            config, pool, parts.learner, data, parts.home, parts.stop,
            gpu=parts.gpu, sync=parts.sync, log=parts.log, start=start,
        )  # fmt: skip

    return parts.train_to_end(run, data.total_steps, start)
