"""The command line: `rlinf-vl <verb>`.

Only modules that every verb needs are imported here: a mistake in a config is reported within a
second, without torch or Ray.
"""

import argparse
import importlib.util
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from rlinf_vl.errors import ConfigError, RunError, missing_package, reason_of

try:
    from rlinf_vl import entry
    from rlinf_vl.cli.parser import parse
    from rlinf_vl.config import load_config
    from rlinf_vl.config.imitation import imitation_config, sampled_problems
    from rlinf_vl.config.validate import Rule
    from rlinf_vl.observe.progress import setup_logging
    from rlinf_vl.observe.spans import write_timeline
    from rlinf_vl.runtime.stop_request import StopRequest
except ModuleNotFoundError as error:  # in a Python that is not the environment's
    if text := missing_package(error):
        sys.exit(f"error: {text}")
    raise

log = logging.getLogger("rlinf_vl")

#: Verb → its errors that mean a mistake of the user, beside ConfigError: a folder that is not a
#: run's, or not as it must be.
MISTAKES = dict.fromkeys(("watch", "timeline", "report", "runs"), (ValueError,)) | {
    "export": (FileNotFoundError, FileExistsError),
    "look": (FileNotFoundError,),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb, and return the exit code: 0 on success, 2 for a mistake of the user, 1 for a
    failure."""
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        poll = select.poll()
        poll.register(sys.stdout, select.POLLERR)
        # The reader has gone, as `head` does: the end that a shell's own commands have.
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        # It was another pipe that broke.
        with suppress(BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
        return 1


def _main(argv: Sequence[str] | None) -> int:
    """Run one verb, and return the exit code."""
    # For module:Name in a config: 'python -m' searches this folder, a console command doesn't.
    sys.path.append(os.getcwd())
    arguments = parse(argv)
    user_errors: tuple[type[Exception], ...] = (ConfigError,)
    user_errors += MISTAKES.get(arguments.verb, ())
    stop_request = StopRequest()
    setup_logging()
    # Both signals unwind, so that nothing is left running.
    stop_request.install()
    try:
        if arguments.verb in ("train", "sft"):
            return _train(arguments, stop_request)
        if arguments.verb == "eval":
            return _evaluate(arguments, stop_request)
        return _run_verb(arguments)
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        text = missing_package(error)
        if text is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 1
    # An OSError names the file that can't be read or written: it needs no traceback.
    except (*user_errors, RunError, OSError) as error:
        print(
            f"error: {reason_of(error) if isinstance(error, ConfigError | RunError) else error}",
            file=sys.stderr,
        )
        return 2 if isinstance(error, user_errors) else 1
    except KeyboardInterrupt:
        return 128 + (stop_request.number or signal.SIGINT)


def _train(arguments: argparse.Namespace, stop_request: StopRequest) -> int:
    from rlinf_vl.preflight.inputs import RULES, libraries_missing, packages_missing

    # A check may run where SGLang and torch are not installed. A Python without torch is not the
    # one that will train: what else it lacks says nothing, and there is nothing to rehearse.
    has_torch = importlib.util.find_spec("torch") is not None
    checked_rules = [libraries_missing] if has_torch else []
    rules = checked_rules if arguments.check else [packages_missing]
    if arguments.verb == "sft":
        config = imitation_config(arguments.config, arguments.overrides, [*rules, *RULES])
    elif arguments.multirun:
        return _sweep(arguments, [sampled_problems, *rules, *RULES], stop_request)
    else:
        rules = [sampled_problems, *rules, *RULES]
        config = load_config(arguments.config, arguments.overrides, rules)
    if arguments.check:
        if has_torch:
            from rlinf_vl.trial import tracker_problems  # imports torch

            # Not before a run, which opens its trackers itself: they may write to a server.
            if problems := list(tracker_problems(config)):
                raise ConfigError(*problems)
            print(entry.rehearse(config))
        return 0
    stopped_by = entry.launch_training(config, stop_request)
    return 128 + stopped_by if stopped_by else 0


def _sweep(arguments: argparse.Namespace, rules: Sequence[Rule], stop_request: StopRequest) -> int:
    from rlinf_vl.sweep.launch import run_sweep
    from rlinf_vl.sweep.plan import check_sweep, plan_sweep

    sweep = plan_sweep(arguments.config, arguments.overrides)
    check_sweep(sweep, rules)
    if arguments.check:
        print(f"{sweep.folder}: {len(sweep.runs)} runs; each of them can begin")
        return 0
    # Not before: it needs torch, and a check may run without.
    from rlinf_vl.report.sweep import build_sweep_report

    code = run_sweep(sweep, arguments.parallel, stop_request)
    log.info("the sweep's report: %s", build_sweep_report(sweep.folder))
    return code


def _evaluate(arguments: argparse.Namespace, stop_request: StopRequest) -> int:
    from rlinf_vl.preflight.inputs import RULES, packages_missing
    from rlinf_vl.runtime.evaluation import evaluation_config

    overrides = list(arguments.overrides)
    if arguments.vision_controls:
        overrides.append(f"data.vision_controls=[{arguments.vision_controls}]")
    config, checkpoint = evaluation_config(
        arguments.config,
        overrides,
        arguments.samples,
        (packages_missing, *RULES),
        arguments.trust_run_code,
    )
    subject = {
        "config": arguments.config,
        "model": config.rollout.model.model_path,
        "checkpoint": str(checkpoint) if checkpoint else None,
    }
    run_dir = entry.launch_evaluation(
        config,
        checkpoint,
        stop_request,
        subject=subject,
        samples=arguments.samples,
        by=arguments.by,
    )
    log.info(
        "the figures are in %s; 'rlinf-vl report %s' shows the answers",
        run_dir / "eval.json",
        run_dir,
    )
    return 0


def _run_verb(arguments: argparse.Namespace) -> int:
    """Run a verb other than `train`, `sft` and `eval`. Each imports its own modules, so that it
    starts fast."""
    match arguments.verb:
        case "config":
            from rlinf_vl.cli.keys import describe

            print(describe(arguments.key))
        case "new":
            from rlinf_vl.cli.new import new

            print(new(arguments.kind, arguments.name))
        case "convert-config":
            from rlinf_vl.cli import convert

            return convert.main(arguments)
        case "completion":
            from rlinf_vl.cli.completion import script

            print(script(arguments.shell))
        case "toy":
            from rlinf_vl.toy.checkpoint import toy_checkpoint_path
            from rlinf_vl.toy.task import toy_dataset_path, toy_of

            print(toy_of(arguments.name).summary())
            for split in ("train", "val"):
                print(f"{split} data: {toy_dataset_path(split, arguments.name)}")
            seed = {} if arguments.seed is None else {"seed": arguments.seed}
            print(f"checkpoint: {toy_checkpoint_path(arguments.name, **seed)}")
        case "export":
            from rlinf_vl.preflight.packages import installed_version, torchvision_command
            from rlinf_vl.publish import publish
            from rlinf_vl.runtime.checkpoints import folder_at

            destination = publish(
                folder_at(arguments.checkpoint),
                arguments.output,
                dtype=arguments.dtype,
                adapters=arguments.adapters,
                push=arguments.push,
                private=arguments.private,
                trust_run_code=arguments.trust_run_code,
            )
            if arguments.adapters:
                log.info(
                    "wrote %s, for peft.PeftModel.from_pretrained on the run's base model",
                    destination,
                )
                return 0
            log.info(
                "wrote %s, for AutoModelForImageTextToText (text only: AutoModelForCausalLM), "
                "AutoTokenizer and AutoImageProcessor; AutoProcessor wants torchvision besides, "
                "for videos (%s)",
                destination,
                "installed here" if installed_version("torchvision") else torchvision_command(),
            )
        case "serve":
            from rlinf_vl.serve import serve

            serve(
                arguments.folder,
                host=arguments.host,
                port=arguments.port,
                key=arguments.key,
                device=arguments.device,
                dtype=arguments.dtype,
                temperature=arguments.temperature,
                max_new_tokens=arguments.max_new_tokens,
                trust_run_code=arguments.trust_run_code,
            )
        case "watch":
            from rlinf_vl.report.watch import watch

            watch(arguments.run_dir, once=arguments.once)
        case "timeline":
            print(write_timeline(arguments.run_dir, arguments.output))
        case "report":
            from rlinf_vl.report import build_report
            from rlinf_vl.report.runs_table import read_folder, runs_table
            from rlinf_vl.report.sweep import build_sweep_report

            if arguments.sweep:
                if len(arguments.runs) != 1:
                    raise ValueError("--sweep: name one folder, that of the sweep")
                print(build_sweep_report(arguments.runs[0], arguments.output))
                return 0
            if len(arguments.runs) == 1 and (lines := read_folder(arguments.runs[0])):
                print(runs_table(lines))
                return 0
            print(build_report(arguments.runs, arguments.output))
        case "look":
            from rlinf_vl.look import main

            return main.main(arguments)
        case "runs":
            from rlinf_vl.report.runs_table import read_folder, runs_json, runs_table

            folder = arguments.folder
            lines = read_folder(folder)
            if not lines:
                raise ValueError(
                    f"{folder}: has no folders of runs; name one that has, such as runner.output_dir"
                )
            if arguments.json:
                print(json.dumps(runs_json(lines), indent=1))
            else:
                print(runs_table(lines))
        case "check-env":
            from rlinf_vl.check_agent.main import is_agent
            from rlinf_vl.check_agent.main import main as check_agent

            # A class is an environment; a function can only be an agent's.
            if arguments.agent or is_agent(arguments.env_class):
                return check_agent(arguments)
            from rlinf_vl.rollout import check_env

            return check_env.main(arguments)
        case "check-reward":
            from rlinf_vl.rollout import check_reward

            return check_reward.main(arguments)
        case "check-data":
            from rlinf_vl.check_data import main

            return main.main(arguments)
        case "prove-family":
            from rlinf_vl.prove.main import main as prove_family

            return prove_family(arguments)
        case "replay":
            from rlinf_vl.replay.main import main as replay

            return replay(arguments, entry.prepare_toys)
        case "compare-batch":
            from rlinf_vl.compare.main import main as compare_batch

            return compare_batch(arguments)
        case "doctor":
            if arguments.smoke:
                from rlinf_vl.smoke.main import main as smoke

                return smoke(arguments)
            from rlinf_vl.preflight import doctor

            return doctor.main(arguments)
        case "preflight":
            from rlinf_vl.preflight import table

            return table.main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
