"""An evaluation: a rollout pool without a learner answers the validation rows; its answers are
written as those of a run."""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.batch import check_errors
from rlinf_vl.controller.dataset_plan import check_rows
from rlinf_vl.controller.protocols import Pool
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.tasks import make_tasks, store_only
from rlinf_vl.controller.vision_controls import ControlRun, plan_controls
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.sources import open_source
from rlinf_vl.driver.parts import Parts
from rlinf_vl.errors import ConfigError, RunError, reason_of
from rlinf_vl.extras.eval.figures import control_figures, evaluation
from rlinf_vl.observe.seeing import right_shares, shares_by_control
from rlinf_vl.rollout.episode.env_makers import pays_row_answers
from rlinf_vl.rollout.submission import Task
from rlinf_vl.runtime.checkpoints import Folder
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.runtime.run_folder import write_baselines
from rlinf_vl.types import GroupSummary, Reference

logger = logging.getLogger(__name__)

#: Columns that get a table by their values without being asked for, where rows have them.
USUAL_COLUMNS = ("category", "difficulty", "data_source")
#: Number of different values above which such a column gets no table.
MAX_VALUES = 50
#: Share of a GPU's memory for an engine that shares it with nobody, where the config says `auto`.
GPU_SHARE = {"cuda": 0.85, "cpu": 0.6}


def columns_of(config: Config, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of these columns by row of the validation data; without names, of those of
    `USUAL_COLUMNS` that the data have.

    Raises:
        ConfigError: no data has a column of this name.
    """
    sources = [open_source(path, "val") for path in config.data.val_data_paths]
    available = sorted({name for source in sources for name in source.plain_columns(())})
    columns: dict[str, list[Any]] = {}
    for name in names or USUAL_COLUMNS:
        if name in available:
            values = [value for source in sources for value in source.column(name)]
            # A usual column may hold something else here, such as an id: one line a row is no
            # table.
            if names or len(set(map(str, values))) <= MAX_VALUES:
                columns[name] = values
        elif names:
            raise ConfigError(
                f"--by {name}: no such column in data.val_data_paths; columns are "
                f"{', '.join(available)}"
            )
    return columns


@contextmanager
def exported(checkpoint: Folder, folder: Path, dtype: str) -> Iterator[str]:
    """Export the checkpoint into a model folder inside `folder`, which is removed when the context
    ends.

    `folder` is one that all machines see, as they see the run's. `evaluation_config` has asked for
    consent to the Python that the checkpoint's run brings along.

    Raises:
        RunError: the checkpoint can't be read.
    """
    from rlinf_vl.extras.export.export import export_checkpoint

    with tempfile.TemporaryDirectory(dir=folder, prefix=".model-") as model_folder:
        try:
            export_checkpoint(checkpoint, Path(model_folder), dtype, trust_run_code=True)
        except Exception as error:
            raise RunError(f"checkpoint: {checkpoint} can't be read: {reason_of(error)}") from error
        yield model_folder


def evaluate(
    parts: Parts, *, samples: int, columns: dict[str, list[Any]], subject: dict[str, Any]
) -> dict[str, Any]:
    """Answer every validation row `samples` times; write `eval.json`, and trajectories and metrics
    as those of a step 0, into the run's folder.

    Args:
        columns: column → its value in each row; each gets a table by its values.
        subject: the config, model and checkpoint that are evaluated, for `eval.json`.

    Returns:
        The content of `eval.json`.

    Raises:
        ConfigError, RunError: no row can be used; too many are bad; every trajectory failed.
    """
    config, run_dir, log, progress = parts.config, parts.run_dir, parts.log, parts.progress
    # Without ranks the engines need not leave memory to them.
    if config.rollout.gpu_memory_utilization == "auto":
        config.rollout.gpu_memory_utilization = GPU_SHARE[parts.device]
    progress.phase("starting rollout workers")
    pool = parts.start_pool()
    n = pool.start()["val"]
    n = n if config.data.val_samples < 0 else min(config.data.val_samples, n)
    bad_rows = BadRows(run_dir, config.data.max_bad_rows, {"val": n})
    checked = check_rows(config, "val", n, pool, bad_rows, progress)
    answers, controls = checked.kept, plan_controls(config, checked)
    log.open(0, 0, {})
    if pays_row_answers(config):
        write_baselines(run_dir, Counter(map(str.strip, answers.values())))
    rows = list(answers)
    tasks = make_tasks("val", rows, samples, config.runner.seed, 0)
    summaries = answer_tasks(pool, log, tasks)
    check_errors(summaries, log)
    bad_rows.add_failed("val", summaries, 0)
    # Rows that can't be used have no summary, and so no place in the tables.
    values_by_column = {}
    for name, values in columns.items():
        values_by_column[name] = [values[row] for row in rows]
    figures = subject | evaluation(summaries, samples, values_by_column)
    figures["bad_rows"] = bad_rows.counts()["val"]
    if controls:
        progress.phase("evaluating under vision controls")
        with closing(ControlRun(pool, tasks, controls)) as control_run:
            figures["vision_controls"] = control_figures(
                right_shares(rows, summaries), shares_by_control(control_run.results())
            )
    with write_aside(run_dir / "eval.json") as file:
        file.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pool.release(log.end_step(0, _metrics(figures)))
    parts.finish()
    return figures


def _metrics(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures under the names that a run's validation has, so that reports show both alike."""
    metrics = {
        "val/accuracy": figures["pass@1"]["mean"] or 0.0,
        "val/problems": figures["pass@1"]["problems"],
        "val/errors": sum(figures["errors"].values()),
        "val/ungradable": figures["ungradable"],
        "val/response_length_mean": figures["response_tokens"] or 0.0,
    }
    metrics |= {f"val/env/{name}": value for name, value in figures["env"].items()}
    metrics |= {f"val/reward/{name}": value for name, value in figures["reward_parts"].items()}
    return metrics


def answer_tasks(pool: Pool, log: RunLog, tasks: Sequence[Task]) -> list[GroupSummary]:
    """Return the summary of each task's group, in the order of the tasks. Only groups that are
    recorded are stored."""
    numbers = {task.group_id: k for k, task in enumerate(tasks)}
    recorded = log.recorder.choose("val", 0, len(tasks))
    summaries: dict[int, GroupSummary] = {}
    groups: dict[int, Reference] = {}
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
