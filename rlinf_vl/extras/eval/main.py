"""The verb `eval`: answer the validation rows with a model or a checkpoint."""

import argparse
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vl.config import Config
from rlinf_vl.config.parts import load_part
from rlinf_vl.driver.entry import explained, prepare_toys, recorded
from rlinf_vl.extras.eval.config import evaluation_config
from rlinf_vl.observe.lines import EventLog
from rlinf_vl.runtime import run_folder as folders
from rlinf_vl.runtime.checkpoints import Folder
from rlinf_vl.runtime.stop_request import StopRequest

log = logging.getLogger("rlinf_vl")


def main(arguments: argparse.Namespace) -> None:
    """Evaluate, and say where the figures are."""
    overrides = list(arguments.overrides)
    if arguments.vision_controls:
        overrides.append(f"data.vision_controls=[{arguments.vision_controls}]")
    config, checkpoint = evaluation_config(
        arguments.config,
        overrides,
        arguments.samples,
        load_part("start-rules"),
        arguments.trust_run_code,
    )
    subject = {
        "config": arguments.config,
        "model": config.rollout.model.model_path,
        "checkpoint": str(checkpoint) if checkpoint else None,
    }
    run_dir = launch_evaluation(
        config,
        checkpoint,
        arguments.stop_request,
        subject=subject,
        samples=arguments.samples,
        by=arguments.by,
    )
    log.info(
        "the figures are in %s; 'rlinf-vl report %s' shows the answers",
        run_dir / "eval.json",
        run_dir,
    )


def launch_evaluation(
    config: Config,
    checkpoint: Folder | None,
    stop_request: StopRequest,
    *,
    subject: dict[str, Any],
    samples: int,
    by: Sequence[str],
) -> Path:
    """Answer the validation rows with the config's model, or with a checkpoint of it; returns the
    folder of the figures.

    Args:
        config: a result of `evaluation_config`.
        subject: config, model and checkpoint that are evaluated, for `eval.json`.
        samples: answers to each problem.
        by: columns that get tables of their own; none: the usual ones.

    Raises:
        ConfigError, RunError, KeyboardInterrupt: see `train`.
    """
    run_dir = folders.run_folder(config)
    # Absolute, as actors have other working folders.
    config.runner.output_dir = str(run_dir.parent)
    with folders.locked(run_dir):
        # After the config is known to be valid: these imports and the toy's warm start take
        # seconds.
        from rlinf_vl.driver.backends import parts_of
        from rlinf_vl.extras.eval import evaluate
        from rlinf_vl.extras.eval.figures import render

        load_part("refuse-machine")(config)
        model_path = prepare_toys(config)
        columns = evaluate.columns_of(config, by)
        folders.open_folder(
            config, run_dir, None, partial(EventLog(run_dir).add, level=logging.INFO)
        )
        with explained(run_dir), ExitStack() as stack:
            if checkpoint:
                precision = config.rollout.model.precision
                model_path = stack.enter_context(evaluate.exported(checkpoint, run_dir, precision))
            progress = stack.enter_context(recorded(run_dir))
            parts = parts_of(config, model_path, run_dir, progress, stop_request, learns=False)
            figures = evaluate.evaluate(
                stack.enter_context(parts), samples=samples, columns=columns, subject=subject
            )
    print(render(figures))
    return run_dir
