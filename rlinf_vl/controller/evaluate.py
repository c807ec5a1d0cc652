"""An evaluation: a rollout pool without a learner answers the validation rows, and what it says is written as a run's."""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.batch import check_errors
from rlinf_vl.controller.draw import make_tasks, store_only
from rlinf_vl.controller.parts import Pool
from rlinf_vl.controller.run_data import check_rows
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.sources import open_source
from rlinf_vl.envs.registry import grades_answers, load_env_class
from rlinf_vl.errors import ConfigError, RunError, reason_of
from rlinf_vl.observe.evaluation import evaluation
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.pool import RolloutPool
from rlinf_vl.rollout.submission import Task
from rlinf_vl.runtime.checkpoints import Folder
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.run_folder import write_baselines
from rlinf_vl.types import GroupSummary

logger = logging.getLogger(__name__)

#: Columns whose values get a table of their own where rows have them.
USUAL_COLUMNS = ("category", "difficulty", "data_source")
#: With more different values, such a column gets none unless it is asked for.
MOST_VALUES = 50
#: Share of a GPU's memory for an engine that has it for itself, where the config says `auto`.
GPU_SHARE = {"cuda": 0.85, "cpu": 0.6}


def columns_of(config: Config, wanted: Sequence[str]) -> dict[str, list[Any]]:
    """Values of these columns, or of those of `USUAL_COLUMNS` that are there, by row of the validation data.

    Raises:
        ConfigError: no data has a column that is wanted.
    """
    sources = [open_source(path, "val") for path in config.data.val_data_paths]
    there = sorted({name for source in sources for name in source.plain_columns(())})
    for name in wanted:
        if name not in there:
            raise ConfigError(f"--by {name}: no such column in data.val_data_paths; columns are {', '.join(there)}")
    found = {
        name: [value for source in sources for value in source.column(name)]
        for name in wanted or USUAL_COLUMNS
        if name in there
    }
    return {name: values for name, values in found.items() if wanted or len(set(map(str, values))) <= MOST_VALUES}


@contextmanager
def exported(checkpoint: Folder, folder: Path, dtype: str) -> Iterator[str]:
    """The checkpoint as a model folder inside `folder` (which all machines see, as they see the run's), until the context ends.
    `evaluation_config` has asked for consent to the Python that its run brings along.

    Raises:
        RunError: it can't be read.
    """
    from rlinf_vl.controller.export import export_checkpoint

    with tempfile.TemporaryDirectory(dir=folder, prefix=".model-") as made:
        try:
            export_checkpoint(checkpoint, Path(made), dtype, trust_run_code=True)
        except Exception as error:
            raise RunError(f"checkpoint: {checkpoint} can't be read: {reason_of(error)}") from error
        yield made


def evaluate(
    config: Config,
    model_path: str,
    reservation: Reservation,
    run_dir: Path,
    progress: RunProgress,
    check: Callable[[], None],
    *,
    samples: int,
    columns: dict[str, list[Any]],
    subject: dict[str, Any],
) -> dict[str, Any]:
    """Answer every validation row `samples` times; write `eval.json` (with `subject`: what was evaluated), the trajectories and
    metrics of a step 0 into `run_dir`. Returns the figures.

    Raises:
        ConfigError, RunError: no row can be used; too many are bad; every trajectory failed.
    """
    if config.rollout.gpu_memory_utilization == "auto":
        config.rollout.gpu_memory_utilization = GPU_SHARE[reservation.device]
    with closing(RunLog(config, run_dir, model_path, progress)) as log:
        progress.phase("starting rollout workers")
        pool = RolloutPool(config, model_path, reservation, report=log.event, check=check)
        n = pool.start()["val"]
        n = n if config.data.val_samples < 0 else min(config.data.val_samples, n)
        bad_rows = BadRows(run_dir, config.data.max_bad_rows, {"val": n})
        answers = check_rows(config, "val", n, pool, bad_rows, progress).kept
        log.open(0, 0, {})
        if grades_answers(load_env_class(config.rollout.env_class, config.runner.code_files)):
            write_baselines(run_dir, Counter(map(str.strip, answers.values())))
        rows = list(answers)
        summaries = answer_tasks(pool, log, make_tasks("val", rows, samples, config.runner.seed, 0))
        check_errors(summaries, log)
        bad_rows.add_failed("val", summaries, 0)
        made = subject | evaluation(summaries, samples, {k: [v[row] for row in rows] for k, v in columns.items()})
        made["bad_rows"] = bad_rows.counts()["val"]
        with write_aside(run_dir / "eval.json") as file:
            file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        metrics = {"val/accuracy": made["pass@1"]["mean"] or 0.0, "val/problems": made["pass@1"]["problems"]}
        metrics |= {"val/errors": sum(made["errors"].values()), "val/ungradable": made["ungradable"]}
        metrics |= {"val/response_length_mean": made["response_tokens"] or 0.0}
        measured = {f"val/env/{name}": value for name, value in made["env"].items()}
        measured |= {f"val/reward/{name}": value for name, value in made["reward_parts"].items()}
        pool.release(log.end_step(0, metrics | measured))
        pool.release(log.recorder.close())
        pool.stop()
    return made


def answer_tasks(pool: Pool, log: RunLog, tasks: Sequence[Task]) -> list[GroupSummary]:
    """Return what was sampled for each task, in their order. Only groups that are recorded are stored."""
    numbers = {task.group_id: k for k, task in enumerate(tasks)}
    recorded = log.recorder.choose("val", 0, len(tasks))
    summaries: dict[int, GroupSummary] = {}
    groups: dict[int, ray.ObjectRef] = {}
    for summary, group in pool.submit(store_only(tasks, recorded)):
        k = numbers[summary.id]
        if group is not None:
            groups[k] = group
        is_new = k not in summaries  # a group comes again if its worker dies
        summaries[k] = summary
        n_answered = len(summaries)
        log.progress.phase("evaluating", done=n_answered, total=len(tasks))
        if is_new and n_answered * 10 // len(tasks) > (n_answered - 1) * 10 // len(tasks):
            logger.info("evaluating: %d of %d problems", n_answered, len(tasks))
    in_order = [summaries[k] for k in range(len(tasks))]
    log.recorder.record("val", 0, in_order, groups, recorded)
    return in_order
