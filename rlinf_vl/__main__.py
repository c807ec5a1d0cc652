"""The command line: `python -m rlinf_vl <verb>`."""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlinf_vl.config import ConfigError, load_config, save_config
from rlinf_vl.controller.stop_request import StopRequest
from rlinf_vl.errors import RunError
from rlinf_vl.observe.progress import RunProgress, setup_logging

log = logging.getLogger("rlinf_vl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0 on success, 2 for a mistake in what was asked, 1 for a failure."""
    parser = argparse.ArgumentParser(prog="rlinf_vl", description="Reinforcement learning for vision-language models.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    train = verbs.add_parser("train", help="run one experiment")
    train.add_argument("config", help="name of a config in examples/reasoning/config/vqa, or a path to a YAML file")
    train.add_argument("overrides", nargs="*", help="Hydra overrides, such as runner.max_steps=3")
    train.set_defaults(run=_train)

    toy = verbs.add_parser("toy", help="make the toy dataset and its warm-started checkpoint (cached)")
    toy.add_argument(
        "--seed", type=int, default=None, help="seed of the checkpoint; the default is the one configs use"
    )
    toy.set_defaults(run=_toy)

    export = verbs.add_parser("export", help="turn a checkpoint into a Hugging Face model folder")
    export.add_argument(
        "checkpoint", type=Path, help="a run's folder (its newest checkpoint), or checkpoints/global_step_N"
    )
    export.add_argument("output", type=Path, help="folder to write; must be empty or absent")
    export.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="dtype of the weights")
    export.set_defaults(run=_export)

    arguments = parser.parse_args(argv)
    arguments.stop_request = stop_request = StopRequest()
    setup_logging()
    stop_request.install()  # both signals unwind, so that nothing is left running
    try:
        return arguments.run(arguments) or 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + (stop_request.number or signal.SIGINT)


def _train(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    # After the config is known to be sound: these imports and the toy's warm start take seconds.
    from rlinf_vl.controller.grpo import GrpoController
    from rlinf_vl.controller.launch import place, ray_cluster
    from rlinf_vl.controller.stop_request import Interrupted

    run_dir = Path(config.runner.output_dir).absolute() / config.runner.experiment_name
    model_path = _prepare_toy(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, run_dir / "config.yaml")
    with RunProgress() as progress:
        progress.phase("starting Ray")
        start = time.monotonic()
        stop_request, code = arguments.stop_request, 0
        with ray_cluster(config), place(config) as placement:
            stop_request.install()  # Ray has put a handler of its own
            controller = GrpoController(config, model_path, placement, run_dir, progress, stop_request)
            log.info("started in %.0f s; training to step %d", time.monotonic() - start, controller.total_steps)
            try:
                controller.fit()
                controller.stop()
            except Interrupted as stop:
                code = 128 + stop.number
                controller.stop()
            finally:
                controller.trackers.close()
                if happened := controller.events.summary():
                    log.info("beside its steps: %s (%s)", happened, run_dir / "events.jsonl")
    metrics = controller.metrics
    log.info("%.0f s from the start of Ray to its end", time.monotonic() - start)
    log.info("done: %s", ", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k in ("reward/mean", "val/accuracy")))
    log.info("the run is in %s", run_dir)
    return code


def _prepare_toy(config) -> str:
    """Make the toy's data and checkpoint if the config asks for them; returns the model's path."""
    if "toy" in config.data.train_data_paths + config.data.val_data_paths:
        from rlinf_vl.data.toy import toy_dataset_path

        for split in ("train", "val"):
            toy_dataset_path(split)
    path = config.rollout.model.model_path
    if path != "toy":
        return path
    from rlinf_vl.models.toy import toy_checkpoint_path

    return str(toy_checkpoint_path())


def _toy(arguments: argparse.Namespace) -> int:
    from rlinf_vl.data.toy import toy_dataset_path
    from rlinf_vl.models.toy import toy_checkpoint_path, toy_summary

    print(toy_summary())
    for split in ("train", "val"):
        print(f"{split} data: {toy_dataset_path(split)}")
    seed = {} if arguments.seed is None else {"seed": arguments.seed}
    print(f"checkpoint: {toy_checkpoint_path(**seed)}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from rlinf_vl.controller.export import export_checkpoint

    try:
        export_checkpoint(arguments.checkpoint, arguments.output, arguments.dtype)
    except (FileNotFoundError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    log.info("wrote %s", arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
