"""Seconds of a step, final accuracy and staleness with each `runner.schedule`, engine and rank on a core each.

    python benchmarks/schedules.py [--tasks toy maze tail] [--seeds 1 2 3] [--steps N] [--staleness 1] [--set KEY=VALUE …]
                                   [--json FILE]

Each run is `python -m rlinf_vl train` in a folder of its own, one after the other. `toy` and `maze` are the embedded tasks; accuracy
is that of their last validation. `toy` has the learning rate 3e-4 in each schedule: at 5e-4, one step off policy
already costs accuracy. `tail` is the toy's questions with one answer in 20 ten times as long as the others (`LongTail`), rewarded by
chance; groups may then be `--tail-staleness` steps old, and a step of decoding takes `--decode-ms` longer, as a GPU's does however
few its rows are. The rank's process is kept on one core, the rollout worker's on another, in every schedule. A step's seconds are a
mean over all steps but the first three and the last (which validates); `ratio` is that over `sync`'s of the same task and seed.
`stalest`: by the versions of all tokens trained on.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from rlinf_vl.engines.torch.batch import Batch
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.envs import StepResult
from rlinf_vl.runtime.files import read_lines
from rlinf_vl.types import Completion, Message, Problem, Request

#: Tokens of `tail`'s answers: as many as the toy's own have, and ten times as many.
SHORT, LONG = 13, 130
#: Config, steps and overrides of each task.
TASKS = {
    "toy": ("toy-grpo-cpu", 120, ("actor.optim.lr=3e-4",)),
    "maze": ("toy-maze-cpu", 60, ()),
    "tail": (
        "toy-grpo-cpu",
        40,
        (
            f"rollout.env_class={Path(__file__).resolve()}:LongTail",
            f"algorithm.sampling_params.max_new_tokens={LONG}",
            f"algorithm.val_sampling_params.max_new_tokens={LONG}",
            "data.max_prompt_length=256",
        ),
    ),
}
SCHEDULES = ("sync", "one_step_off", "async")
#: Steps at the start that are not timed: caches fill, and nothing is ahead yet.
WARM_UP = 3
_submit, _decode = TorchEngine.submit, Batch.decode


class LongTail:
    """Asks the toy's question once and pays by chance. In a process that has such an environment, one answer in 20 of the embedded
    engine has `LONG` tokens and every other one `SHORT`, whatever the model would say."""

    def __init__(self, decode_ms: float, *, seed: int) -> None:
        """`decode_ms`: how much longer a step of decoding takes, whatever its rows: a GPU reads all weights in it."""
        TorchEngine.submit = _submit_by_length
        Batch.decode = partialmethod(_decode_slowly, decode_ms / 1000)
        self.reward = float(random.Random(seed).random() < 0.5)

    def start(self, problem: Problem) -> list[Message]:
        return list(problem.messages)

    def step(self, response: str) -> StepResult:
        return StepResult((), self.reward, True)

    def close(self) -> None:
        pass


def _decode_slowly(self: Batch, seconds: float, version: int) -> None:
    time.sleep(seconds)
    _decode(self, version)


def _submit_by_length(self: TorchEngine, requests: Sequence[Request]) -> list[Future[Completion]]:
    """Each request's samples as up to two requests, of a length each; the answer has them in their order again."""
    futures = []
    for request in requests:
        long = [seed % 20 == 0 for seed in request.seeds]
        parts = []
        for is_long in {*long}:
            sampling = replace(
                request.sampling, max_new_tokens=LONG if is_long else SHORT, stop_ids=()
            )
            seeds = tuple(
                seed for seed, mine in zip(request.seeds, long, strict=True) if mine == is_long
            )
            parts.append((is_long, replace(request, sampling=sampling, seeds=seeds, sessions=())))
        futures.append(
            _joined(
                long,
                dict(zip((l for l, _ in parts), _submit(self, [r for _, r in parts]), strict=True)),
            )
        )
    return futures


def _joined(long: Sequence[bool], parts: dict[bool, Future[Completion]]) -> Future[Completion]:
    whole: Future[Completion] = Future()
    left = [len(parts)]
    lock = threading.Lock()

    def finished(part: Future[Completion]) -> None:
        with lock:
            left[0] -= 1
            if left[0] or not whole.set_running_or_notify_cancel():
                return
        try:
            samples = {is_long: iter(one.result().samples) for is_long, one in parts.items()}
            whole.set_result(Completion(tuple(next(samples[is_long]) for is_long in long)))
        except Exception as error:
            whole.set_exception(error)

    for part in parts.values():
        part.add_done_callback(finished)
    return whole


def _keep_on_cores(run: int) -> None:
    """Keep all threads that the rank of the run with this process id has now on one core, and those of its rollout worker on
    another; threads that these start stay there, too."""
    cores = dict(
        zip(("ray::ActorRank", "ray::RolloutRank"), sorted(os.sched_getaffinity(0)), strict=False)
    )
    for process in psutil.Process(run).children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            name = "".join(process.cmdline()[:1]).partition(".")[0]
            for thread in process.threads() if name in cores else ():
                os.sched_setaffinity(thread.id, {cores[name]})


def run(
    task: str, schedule: str, seed: int, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Train once; what is said of it."""
    config, steps, overrides = TASKS[task]
    steps = args.steps or steps
    staleness = (
        args.tail_staleness if task == "tail" else args.staleness if schedule == "async" else 1
    )
    settings = {
        "cluster.component_placement": "{actor: 0, rollout: 1}",
        "runner.schedule": schedule,
        "runner.max_staleness": staleness,
        "runner.output_dir": folder,
        "runner.experiment_name": "run",
        "runner.seed": seed,
        "data.seed": seed,
        "runner.max_steps": steps,
        "runner.val_check_interval": steps,
        "runner.val_before_train": "false",
        "runner.save_interval": -1,
        "runner.trajectories.max_gb": 0,
    }
    command = [
        sys.executable,
        "-m",
        "rlinf_vl",
        "train",
        config,
        *(f"{k}={v}" for k, v in settings.items()),
    ]
    if task == "tail":
        command.append(f"rollout.env_kwargs={{decode_ms: {args.decode_ms}}}")
    with subprocess.Popen([*command, *overrides, *args.set], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (folder / "run/metrics.jsonl").exists():
            _keep_on_cores(process.pid)
            time.sleep(1)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    rows = [row for row in read_lines(folder / "run/metrics.jsonl")[0] if row["step"]]
    timed = rows[WARM_UP:-1]
    mean = {
        name: statistics.fmean(row[f"time/{name}"] for row in timed)
        for name in ("step", "generate", "train")
    }
    return {
        "task": task,
        "schedule": schedule,
        "seed": seed,
        "steps": steps,
        "max_staleness": 0 if schedule == "sync" else staleness,
        **{f"{name}_seconds": seconds for name, seconds in mean.items()},
        "engines_waited_seconds": statistics.fmean(
            row.get("schedule/engines_waited", 0.0) for row in timed
        ),
        "accuracy": rows[-1]["val/accuracy"],
        "reward": statistics.fmean(row["reward/mean"] for row in rows[-10:]),
        "stalest": max(row["step"] - 1 - row["rollout/weight_version_min"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="of every run; else as many as its config has")
    parser.add_argument(
        "--staleness", type=int, default=1, help="runner.max_staleness of async on toy and maze"
    )
    parser.add_argument(
        "--tail-staleness", type=int, default=8, help="runner.max_staleness on tail"
    )
    parser.add_argument(
        "--decode-ms", type=float, default=10, help="what a step of decoding takes longer on tail"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    made: list[dict[str, Any]] = []
    table = Table(
        "task",
        "seed",
        "schedule",
        "s/step",
        "ratio",
        "wait",
        "train",
        "engines wait",
        "accuracy",
        "stalest",
    )
    for task in args.tasks:
        for seed in args.seeds:
            for schedule in args.schedules:
                with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
                    one = run(task, schedule, seed, Path(folder), args)
                sync = [
                    m for m in made if (m["task"], m["seed"], m["schedule"]) == (task, seed, "sync")
                ]
                one["ratio"] = one["step_seconds"] / sync[0]["step_seconds"] if sync else 1.0
                made.append(one)
                names = (
                    "step_seconds",
                    "ratio",
                    "generate_seconds",
                    "train_seconds",
                    "engines_waited_seconds",
                    "accuracy",
                )
                figures = (f"{one[name]:.3f}" for name in names)
                table.add_row(
                    task,
                    str(seed),
                    schedule,
                    *figures,
                    f"{one['stalest']} of {one['max_staleness']}",
                )
                Console().print(one)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
