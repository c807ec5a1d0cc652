"""The command line: `python -m rlinf_vl <verb>`."""

import argparse
import logging
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rlinf_vl.config import Config, load_config
from rlinf_vl.errors import ConfigError, RunError, reason_of
from rlinf_vl.observe.lines import EventLog
from rlinf_vl.observe.progress import RunProgress, setup_logging
from rlinf_vl.observe.spans import FOLDER as SPANS
from rlinf_vl.observe.spans import record_spans, write_timeline
from rlinf_vl.observe.status import StatusFile, write_environment
from rlinf_vl.preflight.inputs import packages_missing, problems_here
from rlinf_vl.runtime.run_folder import (
    find_checkpoint,
    load_state,
    locked,
    open_folder,
    recover_checkpoints,
    run_folder,
)
from rlinf_vl.runtime.stop_request import StopRequest

log = logging.getLogger("rlinf_vl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0 on success, 2 for a mistake in what was asked, 1 for a failure."""
    parser = argparse.ArgumentParser(prog="rlinf_vl", description="Reinforcement learning for vision-language models.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    train = verbs.add_parser("train", help="run one experiment")
    train.add_argument("config", help="name of a config in examples/reasoning/config/vqa, or a path to a YAML file")
    train.add_argument("overrides", nargs="*", help="Hydra overrides, such as runner.max_steps=3")
    train.add_argument(
        "--check", action="store_true", help="only say whether it could run: config, data, model, folders"
    )
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

    watch = verbs.add_parser("watch", help="follow a run on this terminal")
    watch.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    watch.add_argument("--once", action="store_true", help="print one page and end")
    watch.set_defaults(run=_watch)

    timeline = verbs.add_parser("timeline", help="merge what every process did when into a trace for ui.perfetto.dev")
    timeline.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    timeline.add_argument("--output", type=Path, default=None, help="the file; the default is RUN_DIR/timeline.json")
    timeline.set_defaults(run=_timeline)

    report = verbs.add_parser("report", help="one HTML file on a run, or on several side by side")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folders of runs, still going or ended")
    report.add_argument(
        "--output", type=Path, default=None, help="the file; the default is report.html in the first run's folder"
    )
    report.set_defaults(run=_report)

    doctor = verbs.add_parser("doctor", help="what this machine has, and what a config would need")
    doctor.add_argument("config", nargs="?", help="as for train; without one, the machine alone")
    doctor.add_argument("overrides", nargs="*", help="as for train")
    doctor.set_defaults(run=_doctor)

    preflight = verbs.add_parser("preflight", help="what a config takes of each GPU's memory; needs no GPU")
    preflight.add_argument("config", help="as for train")
    preflight.add_argument("overrides", nargs="*", help="as for train")
    preflight.add_argument("--gpus", type=int, default=1, help="GPUs in each machine (default 1)")
    preflight.add_argument(
        "--gpu-memory", type=float, default=80, metavar="GB", help="as printed on the card (default 80)"
    )
    preflight.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    preflight.set_defaults(run=_preflight)

    arguments, rest = parser.parse_known_args(argv)  # an option among a run's overrides leaves those after it over
    takes_overrides = "overrides" in arguments
    if dashed := [text for text in rest if text.startswith("-")] if takes_overrides else rest:
        hint = "; overrides are written key=value, without dashes" if takes_overrides else ""
        parser.error(f"unrecognized arguments: {' '.join(dashed)}{hint}")
    if rest:
        arguments.overrides += rest
    arguments.stop_request = stop_request = StopRequest()
    setup_logging()
    stop_request.install()  # both signals unwind, so that nothing is left running
    try:
        return arguments.run(arguments) or 0
    except ConfigError as error:
        print(f"error: {reason_of(error)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {reason_of(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + (stop_request.number or signal.SIGINT)
    except Exception as error:
        if (
            isinstance(error, OSError) and "run_dir" not in arguments
        ):  # a file that can't be read or written, by its name
            print(f"error: {error}", file=sys.stderr)
            return 1
        if arguments.verb != "train" or "run_dir" not in arguments:
            raise
        where = arguments.run_dir / "error.txt"
        try:
            where.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError:
            raise error from None
        print(f"error: {reason_of(error)}\nThe whole of it is in {where}", file=sys.stderr)
        return 1


def _train(arguments: argparse.Namespace) -> int:
    rules = [problems_here] if arguments.check else [packages_missing, problems_here]
    config = load_config(arguments.config, arguments.overrides, further=rules)
    if arguments.check:
        return 0

    run_dir = run_folder(config)
    config.runner.output_dir = str(run_dir.parent)  # absolute: actors stand elsewhere
    with locked(run_dir):
        recover_checkpoints(run_dir)
        checkpoint = find_checkpoint(run_dir, config.runner.resume_dir)
        if checkpoint and 0 <= config.runner.max_steps <= (step := load_state(checkpoint)["step"]):
            log.info("nothing left: step %d of %d; raise runner.max_steps", step, config.runner.max_steps)
            return 0
        from rlinf_vl.preflight import doctor  # which takes seconds to import

        doctor.refuse(config)
        events = EventLog(run_dir)
        checkpoint = open_folder(config, run_dir, checkpoint, partial(events.add, level=logging.INFO))
        return _run(arguments, config, run_dir, checkpoint)


def _run(arguments: argparse.Namespace, config: Config, run_dir: Path, checkpoint: Path | None) -> int:
    """Train in a folder that is ready, from a checkpoint or from the start."""
    # After the config is known to be sound: these imports and the toy's warm start take seconds.
    from rlinf_vl.controller.run import run
    from rlinf_vl.preflight.gpu_share import settle_gpu_share
    from rlinf_vl.runtime.launch import ray_cluster, reserve
    from rlinf_vl.runtime.stop_request import Interrupted

    arguments.run_dir = run_dir
    model_path = _prepare_toy(config)
    (run_dir / SPANS).mkdir(exist_ok=True)
    write_environment(run_dir)
    with _report_at_end(run_dir), RunProgress(StatusFile(run_dir)) as progress:
        record_spans(run_dir, "controller")
        progress.phase("starting Ray")
        start = time.monotonic()
        stop_request, code = arguments.stop_request, 0
        with ray_cluster(config), reserve(config) as placement:
            stop_request.install()  # Ray has put a handler of its own
            settle_gpu_share(config, model_path, placement)
            metrics: dict[str, float] = {}
            try:
                metrics = run(config, model_path, placement, run_dir, progress, stop_request, checkpoint)
            except Interrupted as stop:
                code, progress.end, progress.reason = 128 + stop.number, "stopped", str(stop)
    log.info("%.0f s from the start of Ray to its end", time.monotonic() - start)
    log.info("done: %s", ", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k in ("reward/mean", "val/accuracy")))
    log.info("the run is in %s", run_dir)
    return code


@contextmanager
def _report_at_end(run_dir: Path) -> Iterator[None]:
    """Make the run's report when it has ended, well or not; a person in a hurry (Ctrl-C twice) gets none."""
    in_a_hurry = False
    try:
        yield
    except KeyboardInterrupt:
        in_a_hurry = True
        raise
    finally:
        if not in_a_hurry and (run_dir / "metrics.jsonl").exists():
            from rlinf_vl.report import build_report

            try:
                log.info("the report: %s", build_report([run_dir]))
            except Exception as error:  # what was trained is worth more than its report
                log.warning("no report could be made of %s: %r", run_dir, error)


def _prepare_toy(config) -> str:
    """Make the toy's data and checkpoint if the config asks for them; returns the model's path."""
    if "toy" in config.data.train_data_paths + config.data.val_data_paths:
        from rlinf_vl.toy.drawings import toy_dataset_path

        for split in ("train", "val"):
            toy_dataset_path(split)
    path = config.rollout.model.model_path
    if path != "toy":
        return path
    from rlinf_vl.toy.model import toy_checkpoint_path

    return str(toy_checkpoint_path())


def _toy(arguments: argparse.Namespace) -> int:
    from rlinf_vl.toy.drawings import toy_dataset_path
    from rlinf_vl.toy.model import toy_checkpoint_path, toy_summary

    print(toy_summary())
    for split in ("train", "val"):
        print(f"{split} data: {toy_dataset_path(split)}")
    seed = {} if arguments.seed is None else {"seed": arguments.seed}
    print(f"checkpoint: {toy_checkpoint_path(**seed)}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from rlinf_vl.preflight import doctor

    return doctor.main(arguments)


def _preflight(arguments: argparse.Namespace) -> int:
    from rlinf_vl.preflight import table

    return table.main(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from rlinf_vl.report import build_report

    try:
        print(build_report(arguments.runs, arguments.output))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from rlinf_vl.report.watch import watch

    return watch(arguments.run_dir, once=arguments.once)


def _timeline(arguments: argparse.Namespace) -> int:
    try:
        print(write_timeline(arguments.run_dir, arguments.output))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from rlinf_vl.controller.export import export_checkpoint

    try:
        export_checkpoint(arguments.checkpoint, arguments.output, arguments.dtype)
    except (FileNotFoundError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    log.info(
        "wrote %s, for AutoModelForImageTextToText, AutoTokenizer and AutoImageProcessor; AutoProcessor wants torchvision besides, "
        "for videos (pip install torchvision)",
        arguments.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
