"""A run of `rlinf-vl sft`: readers render its rows, its learner imitates them, from the first step to
the last."""

from typing import Any

from rlinf_vl.config.imitation import as_problems
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.driver.parts import Parts
from rlinf_vl.extras.sft.imitate import Sampling, imitate
from rlinf_vl.runtime.checkpoints import Folder

#: Actor ranks for each reader, and the most readers: rendering a row takes about a millisecond.
RANKS_PER_READER, MAX_READERS = 4, 8


def supervise(parts: Parts, start: Folder | None = None) -> dict[str, float]:
    """Train to the last step; returns its metrics.

    Args:
        parts: their `run_dir` holds this run's history only, up to the step of the checkpoint
            `start`.
        start: the checkpoint to resume from; None: begin with the model in `parts.model_path`.

    Raises:
        Interrupted: the run was asked to stop, and has written a checkpoint.
        RunError: the run can't go on; see `imitate`.
    """
    config = parts.config
    parts.progress.phase("starting readers and actor ranks")
    readers = start_readers(parts)
    parts.at_end(readers.stop)
    parts.begin_learner()
    data = find_usable_rows(config, parts.run_dir, readers, parts.progress)
    problems = as_problems(config)
    if config.data.sample_val:
        parts.progress.phase("starting engines")
        parts.start_pool(problems).start()

    def run() -> dict[str, float]:
        sampling = None
        if parts.pool is not None:
            sampling = Sampling(problems, parts.pool, parts.sync, parts.gpu)
        return imitate(
            config, readers, parts.learner, data, parts.home, parts.stop,
            log=parts.log, sampling=sampling, start=start,
        )  # fmt: skip

    return parts.train_to_end(run, data.total_steps, start)


def start_readers(parts: Parts) -> Any:
    """Start the `Readers` of a run: actors on Ray, a thread in a run without it."""
    config, check = parts.config, parts.stop.check
    if config.cluster.backend == "local":
        from rlinf_vl.extras.sft.local_rows import LocalRowReader

        return LocalRowReader(config, parts.model_path, check)
    from rlinf_vl.extras.sft.row_readers import RowReaders

    n_readers = min(MAX_READERS, -(-parts.n_ranks // RANKS_PER_READER))
    return RowReaders(config, parts.model_path, n_readers, check)
