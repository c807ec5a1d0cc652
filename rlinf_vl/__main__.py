"""The command line: `python -m rlinf_vl <verb>`.

Only what every verb needs is imported here: a mistake in a config is told within a second, without torch or Ray.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_vl import running
from rlinf_vl.config import load_config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError, RunError, reason_of
from rlinf_vl.observe.progress import setup_logging
from rlinf_vl.observe.spans import write_timeline
from rlinf_vl.runtime.stop_request import StopRequest

log = logging.getLogger("rlinf_vl")

#: Errors that mean a mistake in what a verb was asked for, beside ConfigError: a folder that is no run's, or not as it must be.
MISTAKES = dict.fromkeys(("watch", "timeline", "report"), (ValueError,)) | {
    "export": (FileNotFoundError, FileExistsError)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0 on success, 2 for a mistake in what was asked, 1 for a failure."""
    arguments = _parse(argv)
    mistakes = (ConfigError, *MISTAKES.get(arguments.verb, ()))
    stop_request = StopRequest()
    setup_logging()
    stop_request.install()  # both signals unwind, so that nothing is left running
    try:
        if arguments.verb in ("train", "eval"):
            return (_train if arguments.verb == "train" else _evaluate)(arguments, stop_request)
        return _run_verb(arguments)
    except (*mistakes, RunError, OSError) as error:  # an OSError names the file that can't be read or written
        print(f"error: {reason_of(error) if isinstance(error, ConfigError | RunError) else error}", file=sys.stderr)
        return 2 if isinstance(error, mistakes) else 1
    except KeyboardInterrupt:
        return 128 + (stop_request.number or signal.SIGINT)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rlinf_vl", description="Reinforcement learning for vision-language models.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, about: str) -> Any:
        """Returns the method that adds an argument to a new verb."""
        return verbs.add_parser(name, help=about).add_argument

    argument = verb("train", "run one experiment")
    argument("config", help="name of a config in examples/, or a path to a YAML file")
    argument("overrides", nargs="*", help="Hydra overrides, such as runner.max_steps=3")
    argument("--check", action="store_true", help="only say whether it could run: config, data, model, folders")

    argument = verb("eval", "measure a model: pass@k with standard errors, tables, trajectories")
    argument("config", help="as for train")
    argument(
        "overrides",
        nargs="*",
        help="as for train; checkpoint=DIR (a run's folder, or checkpoints/global_step_N) or model=DIR",
    )
    argument("--samples", type=int, default=1, metavar="K", help="answers to each problem (default 1)")
    argument(
        "--by",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a table by this column of the data; may be repeated",
    )

    argument = verb("toy", "make an embedded task's data and its warm-started checkpoint (cached)")
    argument("name", nargs="?", choices=TOYS, default="toy", help="the task; toy unless named")
    argument("--seed", type=int, default=None, help="seed of the checkpoint; the default is the one configs use")

    argument = verb("export", "turn a checkpoint into a Hugging Face model folder")
    argument("checkpoint", type=Path, help="a run's folder (its newest checkpoint), or checkpoints/global_step_N")
    argument("output", type=Path, help="folder to write; must be empty or absent")
    argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="dtype of the weights")
    argument(
        "--adapters", action="store_true", help="write a LoRA run's adapters, for peft, instead of the merged model"
    )

    argument = verb("watch", "follow a run on this terminal")
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument("--once", action="store_true", help="print one page and end")

    argument = verb("timeline", "merge what every process did when into a trace for ui.perfetto.dev")
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument("--output", type=Path, default=None, help="the file; the default is RUN_DIR/timeline.json")

    argument = verb("report", "one HTML file on a run, or on several side by side")
    argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folders of runs, still going or ended")
    argument("--output", type=Path, default=None, help="the file; the default is report.html in the first run's folder")

    argument = verb("check-env", "play an environment with random and hostile answers; say what breaks its contract")
    argument("env_class", metavar="NAME", help="as rollout.env_class: a name, module:Class or path/to/file.py:Class")
    argument("overrides", nargs="*", metavar="key=value", help="keywords of its constructor; data.* for --data")
    argument("--data", metavar="FILE", help="rows to start it with, as in data.train_data_paths")
    argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="for one call (default 60)")

    argument = verb("doctor", "what this machine has, and what a config would need")
    argument("config", nargs="?", help="as for train; without one, the machine alone")
    argument("overrides", nargs="*", help="as for train")

    argument = verb("preflight", "what a config takes of each GPU's memory; needs no GPU")
    argument("config", help="as for train")
    argument("overrides", nargs="*", help="as for train")
    argument("--gpus", type=int, default=1, help="GPUs in each machine (default 1)")
    argument("--gpu-memory", type=float, default=80, metavar="GB", help="as printed on the card (default 80)")
    argument("--nodes", type=int, default=1, help="machines (default 1)")

    arguments, rest = parser.parse_known_args(argv)  # an option among a run's overrides leaves those after it over
    takes_overrides = "overrides" in arguments
    if dashed := [text for text in rest if text.startswith("-")] if takes_overrides else rest:
        hint = "; overrides are written key=value, without dashes" if takes_overrides else ""
        parser.error(f"unrecognized arguments: {' '.join(dashed)}{hint}")
    if rest:
        arguments.overrides += rest
    return arguments


def _train(arguments: argparse.Namespace, stop_request: StopRequest) -> int:
    from rlinf_vl.preflight.inputs import RULES, packages_missing

    rules = RULES if arguments.check else (packages_missing, *RULES)
    config = load_config(arguments.config, arguments.overrides, rules)
    if arguments.check:
        return 0
    stopped_by = running.train(config, stop_request)
    return 128 + stopped_by if stopped_by else 0


def _evaluate(arguments: argparse.Namespace, stop_request: StopRequest) -> int:
    from rlinf_vl.preflight.inputs import RULES, packages_missing
    from rlinf_vl.runtime.evaluation import evaluation_config

    rules = (packages_missing, *RULES)
    config, checkpoint = evaluation_config(arguments.config, arguments.overrides, arguments.samples, rules)
    subject = {
        "config": arguments.config,
        "model": config.rollout.model.model_path,
        "checkpoint": str(checkpoint) if checkpoint else None,
    }
    by = {"samples": arguments.samples, "by": arguments.by}
    run_dir = running.evaluate(config, checkpoint, stop_request, subject=subject, **by)
    log.info("the figures are in %s; 'python -m rlinf_vl report %s' shows the answers", run_dir / "eval.json", run_dir)
    return 0


def _run_verb(arguments: argparse.Namespace) -> int:
    """Run a verb other than `train`; each imports what it needs."""
    match arguments.verb:
        case "toy":
            from rlinf_vl.toy.model import toy_checkpoint_path
            from rlinf_vl.toy.task import toy_dataset_path, toy_of

            print(toy_of(arguments.name).summary())
            for split in ("train", "val"):
                print(f"{split} data: {toy_dataset_path(split, arguments.name)}")
            seed = {} if arguments.seed is None else {"seed": arguments.seed}
            print(f"checkpoint: {toy_checkpoint_path(arguments.name, **seed)}")
        case "export":
            from rlinf_vl.controller.export import export_checkpoint

            export_checkpoint(arguments.checkpoint, arguments.output, arguments.dtype, arguments.adapters)
            if arguments.adapters:
                log.info("wrote %s, for peft.PeftModel.from_pretrained on the run's base model", arguments.output)
                return 0
            log.info(
                "wrote %s, for AutoModelForImageTextToText (text only: AutoModelForCausalLM), AutoTokenizer and AutoImageProcessor; "
                "AutoProcessor wants torchvision besides, for videos (pip install torchvision)",
                arguments.output,
            )
        case "watch":
            from rlinf_vl.report.watch import watch

            watch(arguments.run_dir, once=arguments.once)
        case "timeline":
            print(write_timeline(arguments.run_dir, arguments.output))
        case "report":
            from rlinf_vl.report import build_report

            print(build_report(arguments.runs, arguments.output))
        case "check-env":
            from rlinf_vl.rollout import check_env

            return check_env.main(arguments)
        case "doctor":
            from rlinf_vl.preflight import doctor

            return doctor.main(arguments)
        case "preflight":
            from rlinf_vl.preflight import table

            return table.main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
