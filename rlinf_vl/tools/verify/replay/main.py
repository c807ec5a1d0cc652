"""The verb `replay`: records a step of a run as a file, or replays such a file."""

import argparse
import json
import logging
import time
from dataclasses import replace
from pathlib import Path

from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.replay_file import FOLDER, SUFFIX, RecordedStep
from rlinf_vl.tools.verify.replay.minimise import Minimiser, part_of_step
from rlinf_vl.tools.verify.replay.quantities import Quantity
from rlinf_vl.tools.verify.replay.render import as_json, size_text, table
from rlinf_vl.tools.verify.replay.rerun import record_run
from rlinf_vl.tools.verify.replay.run import Outcome, Replay
from rlinf_vl.tools.verify.replay.subject import config_of, subject_of

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    """Run the verb; the exit code is 1 where the implementations differ."""
    path: Path = arguments.path
    if path.is_dir():
        file = record(path, arguments)
        print(f"{file} ({file.stat().st_size / 1e6:.1f} MB); open it with 'rlinf-vl replay {file}'")
        return 0
    step = read_step(path, arguments.trust_run_code)
    config = config_of(step)
    subject = subject_of(step, config)
    try:
        replay = Replay(subject, config)
        outcome = replay(step)
        if arguments.minimise and outcome.first is not None:
            start = time.monotonic()
            minimiser = Minimiser(lambda smaller: _first(replay(smaller)), subject.image_tokens)
            step = minimiser(step)
            outcome = replay(step)
            smallest = path.with_name(f"{path.stem}-minimised{SUFFIX}")
            step.save(smallest)
            log.info(
                "minimised to %s with %d replays in %.0f s; written to %s",
                size_text(step),
                minimiser.replays,
                time.monotonic() - start,
                smallest,
            )
        if arguments.json:
            print(json.dumps(as_json(outcome, step, subject, replay.config), indent=1))
        else:
            print(table(outcome, step, subject, replay.config))
    finally:
        subject.close()
    return 0 if outcome.sound else 1


def _first(outcome: Outcome) -> Quantity | None:
    return None if outcome.first is None else outcome.first.quantity


def record(run_dir: Path, arguments: argparse.Namespace) -> Path:
    """Write the file of a run's step, and return its path."""
    if arguments.step is None:
        raise ConfigError(f"{run_dir} is a run: say which of its steps, --step N")
    step = record_run(
        run_dir,
        arguments.step,
        shape_only=arguments.shape_only,
        trust_run_code=arguments.trust_run_code,
    )
    name = f"step_{arguments.step}"
    if arguments.group is not None:
        if not 0 <= arguments.group < len(step.groups):
            raise ConfigError(
                f"--group {arguments.group}: step {step.step} has groups 0 to "
                f"{len(step.groups) - 1}"
            )
        step = part_of_step(
            step,
            [(arguments.group, i) for i in range(len(step.groups[arguments.group].trajectories))],
        )
        name += f"_group_{arguments.group}"
    file = arguments.output or run_dir / FOLDER / f"{name}{SUFFIX}"
    step.save(file)
    return file


def read_step(path: Path, trust_run_code: bool = False) -> RecordedStep:
    """Read a file; weights that it lacks are computed again from the run that it names.

    Raises:
        ConfigError: it is no replay file.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: name a run's folder with --step N, or a {SUFFIX} file")
    step = RecordedStep.read(path)
    needs_run = not step.weights and not step.random_weights and step.version > 0
    if not needs_run or not (Path(step.run) / "config.yaml").is_file():
        return step
    log.info("the file has no weights: computing them again from %s", step.run)
    computed = record_run(Path(step.run), step.step, trust_run_code=trust_run_code)
    return replace(
        step,
        weights=computed.weights,
        weights_source=computed.weights_source,
        model_files=step.model_files or computed.model_files,
        model_path=computed.model_path,
        engine_weights=step.engine_weights or computed.engine_weights,
        train_logprobs=step.train_logprobs or computed.train_logprobs,
        messages=step.messages or computed.messages,
    )
