"""How soon the toy reaches a held-out accuracy: this loop, and TRL's GRPOTrainer from the same checkpoint with the same settings.

    python benchmarks/time_to_accuracy.py --peer-python PYTHON [--target 0.75] [--seeds 1 2 3] [--set KEY=VALUE …] [--json FILE]

Both train `toy-grpo-cpu`: same checkpoint, rows, prompts (compared id by id), grader, batch, learning rate and schedule, on all
cores of this machine (this loop with an engine and a rank on each of two), one after the other, for each seed in turn. Every
--interval steps each samples --val-samples answers to every held-out question with the weights that it has. The clock runs from the
start of the first step and stands still during evaluations and checkpoints; start-up, which both have, is not in it. Where the
accuracy crosses the target between two evaluations is interpolated. --set overrides keys of this loop's config; without
--peer-python it runs alone.

The machine must be idle. TRL's threads wait for each other in every product; where others want the cores, too, give it one
(--peer-threads 1).

PYTHON: an interpreter that has trl 1.16 and torchvision beside this package's requirements, such as

    bash requirements/install.sh --sglang && .venv-sglang/bin/python -m pip install --no-deps 'trl==1.16.*' 'accelerate==1.15.*'
"""

import argparse
import base64
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlinf_vl.config.load import load_config
from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import open_datasets
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.observe.spans import read_spans
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.row_check import processor_of
from rlinf_vl.runtime.files import read_lines

PEER = Path(__file__).parent / "peers/trl_accuracy.py"
NAME = "toy-grpo-cpu"
#: (step, seconds of training, held-out accuracy)
Curve = list[tuple[int, float, float]]


def rows_of(config: Config, model: str) -> dict[str, list[dict[str, Any]]]:
    """What the peer is told of each row: text, picture, answer, and the ids that the prompt must have."""
    processor = processor_of(config, model)
    renderer = Renderer(processor, config.rollout.thinking.mode)

    def row(problem) -> dict[str, Any]:
        (text,) = (
            part["text"] for part in problem.messages[0]["content"] if part["type"] == "text"
        )
        ids, _ = renderer.prompt(problem.messages, problem.images)
        image = base64.b64encode(problem.images[0].data).decode()
        return {"text": text, "image": image, "answer": problem.answer, "ids": ids.tolist()}

    splits = open_datasets(config.data, ENVIRONMENTS)
    return {split: [row(rows[i]) for i in range(len(rows))] for split, rows in splits.items()}


def ours(folder: Path, args: argparse.Namespace, seed: int) -> Curve:
    """Run this loop until it is over, or has reached the target."""
    overrides = {
        "runner.output_dir": folder,
        "runner.experiment_name": "ours",
        "runner.seed": seed,
        "data.seed": seed,
        "runner.max_steps": args.steps,
        "runner.val_check_interval": args.interval,
        "runner.save_interval": -1,
        "cluster.component_placement": "{actor: 0-1, rollout: 0-1}",
        "data.val_data_paths": f"[{','.join(['toy'] * args.val_samples)}]",
    }
    settings = [f"{key}={value}" for key, value in overrides.items()] + args.set
    run = folder / "ours"

    def curve() -> Curve:
        lines = read_lines(run / "metrics.jsonl")[0] if (run / "metrics.jsonl").exists() else []
        return [
            (line["step"], 0.0, line["val/accuracy"]) for line in lines if "val/accuracy" in line
        ]

    command = [sys.executable, "-m", "rlinf_vl", "train", NAME, *settings]
    wait_for(
        command,
        folder / "ours.log",
        lambda: any(accuracy >= args.target for _, _, accuracy in curve()),
    )
    spans = [span for span in read_spans(run) if span["process"] == "controller"]
    steps = {span["about"]["step"]: span for span in spans if span["name"] == "step"}
    pauses = [span for span in spans if span["name"] in ("validate", "checkpoint")]

    def seconds(step: int) -> float:
        start, end = steps[1]["start"], steps[step]["end"]
        return end - start - sum(p["end"] - p["start"] for p in pauses if start <= p["start"] < end)

    return [(step, seconds(step), accuracy) for step, _, accuracy in curve() if step in steps]


def peer(
    folder: Path, args: argparse.Namespace, config: Config, model: str, rows: dict, seed: int
) -> Curve:
    """Run TRL until it is over, or has reached the target."""
    spec = {
        "model": model,
        "train": rows["train"],
        "val": rows["val"],
        "problems": config.data.rollout_batch_size,
        "samples": config.algorithm.group_size,
        "max_new_tokens": config.algorithm.sampling_params.max_new_tokens,
        "lr": config.actor.optim.lr,
        "warmup": config.actor.optim.lr_warmup_steps,
        "steps": args.steps,
        "interval": args.interval,
        "val_samples": args.val_samples,
        "target": args.target,
        "threads": args.peer_threads,
        "seed": seed,
    }
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    wait_for([args.peer_python, str(PEER), str(folder)], folder / "peer.log", lambda: False)
    return [
        (line["step"], line["seconds"], line["accuracy"])
        for line in read_lines(folder / "peer.jsonl")[0]
    ]


def wait_for(command: Sequence[str], log: Path, enough: Callable[[], bool]) -> None:
    """Run a command to its end, or until there is enough of it; SystemExit with the end of its log if it fails."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    stopped = False
    try:
        while process.poll() is None:
            time.sleep(0.5)
            if not stopped and enough():
                process.send_signal(signal.SIGTERM)  # a run of this loop ends in order
                stopped = True
    finally:
        process.kill()
    if process.wait() and not stopped:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-4000:]}")


def crossing(curve: Curve, target: float) -> tuple[float, float] | None:
    """(seconds, steps) at which the accuracy first reaches the target; None: it does not."""
    for (step, seconds, accuracy), (next_step, next_seconds, higher) in pairwise(
        [(0, 0.0, 0.0), *curve]
    ):
        if higher >= target:
            share = (target - accuracy) / (higher - accuracy) if step else 1.0
            return seconds + share * (next_seconds - seconds), step + share * (next_step - step)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", help="an interpreter that has trl and torchvision")
    parser.add_argument(
        "--peer-threads", type=int, default=len(os.sched_getaffinity(0)), help="of TRL's process"
    )
    parser.add_argument("--target", type=float, default=0.75, help="held-out accuracy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--steps", type=int, default=120, help="of the run, and so of the learning rate's schedule"
    )
    parser.add_argument("--interval", type=int, default=5, help="steps between two evaluations")
    parser.add_argument(
        "--val-samples", type=int, default=3, help="answers to each held-out question"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="of this loop's config"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    config, model = load_config(NAME), str(toy_checkpoint_path())
    rows = rows_of(config, model) if args.peer_python else {}
    curves: dict[str, dict[int, Curve]] = {"here": {}, "TRL": {}}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            curves["here"][seed] = ours(Path(folder), args, seed)
            if args.peer_python:
                curves["TRL"][seed] = peer(Path(folder), args, config, model, rows, seed)
    table = Table("", "seed", f"seconds to {args.target:g}", "steps", "seconds a step")
    found: dict[str, list[float]] = {}
    for who, by_seed in curves.items():
        for seed, curve in by_seed.items():
            there = crossing(curve, args.target)
            if there is None:
                table.add_row(
                    who, str(seed), f"never ({max(c[2] for c in curve):.2f})", str(curve[-1][0]), ""
                )
                continue
            found.setdefault(who, []).append(there[0])
            table.add_row(
                who,
                str(seed),
                f"{there[0]:.1f}",
                f"{there[1]:.0f}",
                f"{curve[-1][1] / curve[-1][0]:.3f}",
            )
    console = Console(width=100)
    console.print(table)
    figures: dict[str, Any] = {"target": args.target, "curves": curves, "seconds": found}
    if all(len(found.get(who, ())) == len(args.seeds) for who in curves):
        figures["sooner"] = statistics.mean(found["TRL"]) / statistics.mean(found["here"])
        console.print(f"{figures['sooner']:.2f} times sooner than TRL")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
