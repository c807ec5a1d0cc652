"""`rlinf-vl doctor CONFIG --smoke`: run every stage within a time limit, and say what was found."""

import argparse
import json
import math
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rlinf_vl.config import load_config
from rlinf_vl.config.schema import Config
from rlinf_vl.driver.backends import parts_of
from rlinf_vl.driver.parts import Parts
from rlinf_vl.errors import ConfigError, reason_of, without_colors
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.spans import FOLDER as SPANS
from rlinf_vl.observe.status import StatusFile
from rlinf_vl.runtime.environment import variables_set
from rlinf_vl.runtime.gpus import gpu_memory
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.tools.check.inputs import packages_missing
from rlinf_vl.tools.check.smoke.memory import MemoryWatch
from rlinf_vl.tools.check.smoke.results import StageResult, State, as_json, header, verdict
from rlinf_vl.tools.check.smoke.stages import Stage, Stages

#: Seconds that a smoke run has by default, by engine. SGLang's first start on a GPU compiles kernels
#: for minutes, and its CPU build takes as long to start.
LIMITS_S = {"torch": 180.0, "sglang": 1200.0}


class TimeLimit:
    """Raises KeyboardInterrupt in the main thread when the time is up: Ray's calls let that
    through."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_up = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block, in the main thread; elsewhere no signal arrives."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def end(*_: object) -> None:
            self.is_up = True
            raise KeyboardInterrupt

        former = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)


def main(arguments: argparse.Namespace) -> int:
    """Run `doctor CONFIG --smoke`; returns 0 if every stage is ok, otherwise 1."""
    if not arguments.config:
        raise ConfigError(
            "--smoke: runs a config: name one, such as `rlinf-vl doctor toy-grpo-cpu --smoke`"
        )
    if arguments.limit is not None and not 0 < arguments.limit < math.inf:
        raise ConfigError(f"--limit {arguments.limit:g}: give seconds, such as --limit 180")
    # Every file that the run needs is there or is made.
    with variables_set({"HF_HUB_OFFLINE": "1"}):
        config = load_config(arguments.config, arguments.overrides, (packages_missing,))
        limit_s = arguments.limit or LIMITS_S[config.rollout.rollout_backend]
        start = time.monotonic()
        results = smoke(config, limit_s)
    line = verdict(results, time.monotonic() - start, limit_s)
    sys.stdout.write(f"\n{line}\n")
    passed = all(result.state == "ok" for result in results)
    if arguments.json:
        content = as_json(
            results, passed, line, config=arguments.config, overrides=arguments.overrides
        )
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


def smoke(config: Config, limit_s: float) -> list[StageResult]:
    """Run every stage, and print each result as it is known. Nothing is left behind."""
    device = config.cluster.device
    if device == "auto":
        device = "cuda" if gpu_memory() else "cpu"
    folder, new_folders = _folder(Path(config.runner.output_dir))
    limit, results = TimeLimit(limit_s), list[StageResult]()
    sys.stdout.write(header() + "\n")
    try:
        with ExitStack() as stack:
            memory = MemoryWatch(device)
            stack.callback(memory.close)
            (folder / SPANS).mkdir()
            progress = stack.enter_context(RunProgress(StatusFile(folder)))

            def make_parts(smoke_config: Config, model_path: str) -> Parts:
                # Without a request to stop: Ctrl-C ends a smoke run at once.
                stop = StopRequest()
                parts = parts_of(smoke_config, model_path, folder, progress, stop)
                return stack.enter_context(parts)

            stages = Stages(config, folder, device, memory, make_parts)
            with limit.running():
                _run_all(stages, memory, limit, results)
    except KeyboardInterrupt:
        if not limit.is_up:
            raise
    finally:
        _remove(config, folder, new_folders)
    return results


def _run_all(
    stages: Stages, memory: MemoryWatch, limit: TimeLimit, results: list[StageResult]
) -> None:
    """Run the stages, and end the parts in order if all went well."""
    state_of: dict[str, State] = {}

    def add(result: StageResult) -> None:
        state_of[result.name] = result.state
        results.append(result)
        sys.stdout.write(result.row() + "\n")
        sys.stdout.flush()

    for stage in stages.all:
        missing = [name for name in stage.needs if state_of[name] != "ok"]
        if limit.is_up:
            add(StageResult(stage.name, "unreached", text=f"--limit {limit.seconds:g} s"))
        elif missing:
            add(StageResult(stage.name, "skipped", text=f"needs {', '.join(missing)}"))
        else:
            add(_run_stage(stage, stages, memory, limit))
    if all(state == "ok" for state in state_of.values()):
        stages.parts.end()


def _run_stage(stage: Stage, stages: Stages, memory: MemoryWatch, limit: TimeLimit) -> StageResult:
    memory.begin()
    start = time.perf_counter()

    def result(state: State, text: str, hint: str = "") -> StageResult:
        seconds, gib = time.perf_counter() - start, memory.peak_gib()
        expected = [stages.preflight[p] for p in stage.phases if p in stages.preflight]
        return StageResult(stage.name, state, seconds, gib, max(expected, default=None), text, hint)

    try:
        return result("ok", stage.run())
    except KeyboardInterrupt:
        if not limit.is_up:
            raise
        return result("unreached", f"cut off by --limit {limit.seconds:g} s")
    # Whatever a part raises is what this stage has found.
    except Exception as error:
        return result("failed", without_colors(reason_of(error)), stage.hint)


def _folder(output_dir: Path) -> tuple[Path, list[Path]]:
    """Make a folder for all files; returns it, and the folders above that were made for it."""
    output_dir = output_dir.absolute()
    new_folders = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="smoke-", dir=output_dir)), new_folders
    except OSError as error:
        raise ConfigError(
            f"runner.output_dir: {output_dir} can't be written ({error.strerror}); name another"
        ) from error


def _remove(config: Config, folder: Path, new_folders: list[Path]) -> None:
    """Remove the smoke run's files, and folders that were made for them and are empty."""
    shutil.rmtree(folder, ignore_errors=True)
    elsewhere = config.runner.checkpoint_dir
    if elsewhere and "://" not in elsewhere:
        shutil.rmtree(Path(elsewhere) / folder.name, ignore_errors=True)
    for path in new_folders:
        with suppress(OSError):
            path.rmdir()
