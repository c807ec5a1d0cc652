"""The toy with each algorithm of docs/algorithms.md, on several seeds and the same budget of answers: a table and a curve.

    python benchmarks/algorithms.py [NAME …] [--seeds 1 2 3] [--steps 120] [--minibatches 4] [--lr 2e-4]
                                    [--set KEY=VALUE …] [--folder results/algorithms] [--json FILE]

Every run is `toy-grpo-cpu` with what `ALGORITHMS` says, several optimizer steps a rollout (with one, the losses have the same
gradient), a learning rate for so many of them (with 5e-4, those that do not clip fall apart in four steps a rollout),
and a checkpoint, a data order and sampling of its seed. The budget is what `--steps` plain steps generate; a run that
generates more in a step, as dynamic sampling does, is read where it has spent that. A run that is there whole is not run again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from rlinf_vl.runtime.files import read_lines

ROOT = Path(__file__).parents[1]
#: What the page of the algorithm, or docs/corrections.md, says; defaults but for what is said here.
ALGORITHMS: dict[str, Sequence[str]] = {
    "grpo": (),
    "dr_grpo": ("algorithm.adv_type=dr_grpo",),
    "rloo": ("algorithm.adv_type=rloo",),
    "reinforce_plus_plus": ("algorithm.adv_type=reinforce_plus_plus",),
    "gspo": ("algorithm.loss_type=gspo",),
    "cispo": ("algorithm.loss_type=cispo",),
    "sapo": ("algorithm.loss_type=sapo",),
    "dapo": (
        "algorithm={clip_ratio_high: 0.28, dynamic_sampling: {enable: true}, overlong: {buffer: 4}}",
    ),
    "no_tis": ("algorithm.importance_sampling_fix=false",),
    "sequence_mis": (
        "algorithm={importance_sampling_level: sequence, rejection: {level: sequence}}",
    ),
    "icepop": ("algorithm={importance_sampling_clip: inf, rejection: {level: token}}",),
    "plain_ppo": ("algorithm={importance_sampling_fix: false, old_policy: sampler}",),
    "interpolated": ("algorithm.old_policy=interpolated",),
    "noisy_rollout": (
        "algorithm.image_corruption={share: 0.5, strength: 0.15}",
    ),  # 0.5 hides drawings of 48 pixels
    "papo": ("algorithm.papo={weight: 0.01, entropy_weight: 0.03}",),
    "distillation": ("algorithm.distillation={teacher_path: TEACHER, reward_weight: 0}",),
    "distillation_top_k": (
        "algorithm.distillation={teacher_path: TEACHER, reward_weight: 0, top_k: 8}",
    ),
}
#: What stands for the model that `toy-grpo-cpu` makes of the seed's checkpoint, as it is.
TEACHER = "TEACHER"
PLAIN = 16 * 8  #: answers of a step of `toy-grpo-cpu`

Point = tuple[float, float]


def run(name: str, seed: int, args: argparse.Namespace) -> Path:
    """Train, unless that has been done; returns the run's folder."""
    from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

    folder = args.folder.absolute() / f"{name}-{seed}"
    rows = read_lines(folder / "metrics.jsonl")[0] if (folder / "metrics.jsonl").exists() else []
    if rows and rows[-1]["step"] == args.steps:
        return folder
    overrides = [
        f"runner.output_dir={folder.parent}",
        f"runner.experiment_name={folder.name}",
        f"runner.seed={seed}",
        f"data.seed={seed}",
        f"runner.max_steps={args.steps}",
        f"algorithm.n_minibatches={args.minibatches}",
        f"actor.optim.lr={args.lr}",
        f"rollout.model.model_path={toy_checkpoint_path(seed=seed)}",
        "runner.save_interval=-1",
        "runner.trajectories.max_gb=0",
        "runner.logger.logger_backends=[]",
        *(
            said.replace(TEACHER, str(teacher(seed, folder.parent))) if TEACHER in said else said
            for said in ALGORITHMS[name]
        ),
        *args.set,
    ]
    subprocess.run(
        [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", *overrides],
        cwd=ROOT,
        check=True,
    )
    return folder


def teacher(seed: int, folder: Path) -> Path:
    """The seed's checkpoint after a run of `toy-grpo-cpu` as it stands, as a model's folder; made once."""
    from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

    run_folder, model = folder / f"teacher-{seed}", folder / f"teacher-{seed}-model"
    if not (model / "config.json").exists():
        where = [
            f"runner.output_dir={folder}",
            f"runner.experiment_name={run_folder.name}",
            "runner.resume_dir=auto",
        ]
        seeds = [
            f"runner.seed={seed}",
            f"data.seed={seed}",
            f"rollout.model.model_path={toy_checkpoint_path(seed=seed)}",
        ]
        command = [sys.executable, "-m", "rlinf_vl"]
        subprocess.run([*command, "train", "toy-grpo-cpu", *where, *seeds], cwd=ROOT, check=True)
        subprocess.run([*command, "export", str(run_folder), str(model)], cwd=ROOT, check=True)
    return model


def spent(folder: Path) -> Iterator[tuple[int, dict]]:
    """Each step of a run: answers generated so far, and its metrics."""
    rows = read_lines(folder / "metrics.jsonl")[0]
    answers = [
        row.get("rollout/generated_groups", PLAIN // 8) * 8 if row["step"] else 0 for row in rows
    ]
    yield from zip(accumulate(answers), rows, strict=True)


def figures_of(folder: Path, budget: int) -> dict[str, float]:
    """What a run had come to when it had generated `budget` answers."""
    rows = [(answers, row) for answers, row in spent(folder) if answers <= budget]
    accuracy: list[Point] = [
        (answers, row["val/accuracy"]) for answers, row in rows if "val/accuracy" in row
    ]
    half = next((answers for answers, value in accuracy if value >= 0.5), float("nan"))
    trained = [row for _, row in rows if row["step"]]
    return {
        "start": accuracy[0][1],
        "accuracy": fmean(value for _, value in accuracy[-3:]),
        "best": max(value for _, value in accuracy),
        "answers_to_half": half,
        "steps": trained[-1]["step"],
        "clip_fraction": fmean(row.get("actor/clip_fraction", float("nan")) for row in trained),
        "entropy": trained[-1]["actor/entropy"],
        "response_length": trained[-1]["rollout/response_length_mean"],
        "seconds_per_step": fmean(row["time/step"] for row in trained),
    }


def curve(folder: Path, steps: int) -> list[Point]:
    """Validation accuracy after as many answers as each tenth plain step has generated, between those that were measured."""
    found = [
        (answers / PLAIN, row["val/accuracy"])
        for answers, row in spent(folder)
        if "val/accuracy" in row
    ]
    return [
        (step, float(np.interp(step, *zip(*found, strict=True))))
        for step in range(0, steps + 1, 10)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(ALGORITHMS)}; none: all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--minibatches", type=int, default=4, help="optimizer steps of a rollout")
    parser.add_argument("--lr", type=float, default=2e-4, help="the peak of the learning rate")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides, of every run"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "results/algorithms")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    names = args.names or list(ALGORITHMS)
    if unknown := set(names) - ALGORITHMS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ALGORITHMS)}")
    runs = {name: [run(name, seed, args) for seed in args.seeds] for name in names}
    budget = args.steps * PLAIN
    table = Table(
        title=f"val/accuracy after {budget:,} answers, {len(args.seeds)} seeds: mean (lowest … highest)"
    )
    figures: dict[str, float | int] = {
        "steps": args.steps,
        "minibatches": args.minibatches,
        "lr": args.lr,
        "answers": budget,
    }
    columns = (
        "accuracy",
        "best",
        "answers_to_half",
        "clip_fraction",
        "entropy",
        "response_length",
        "seconds_per_step",
    )
    for column in ("algorithm", *columns):
        table.add_column(column.replace("_", " "))
    series: dict[str, list[Point]] = {}
    for name, folders in runs.items():
        found = [figures_of(folder, budget) for folder in folders]
        cells = []
        for column in columns:
            values = [one[column] for one in found]
            digits = 0 if column == "answers_to_half" else 3
            spread = (
                f" ({min(values):.{digits}f} … {max(values):.{digits}f})" if len(values) > 1 else ""
            )
            cells.append(f"{fmean(values):.{digits}f}{spread}".replace("nan", "–"))
            figures |= {
                f"{name}, seed {seed}: {column}": v
                for seed, v in zip(args.seeds, values, strict=True)
                if v == v
            }
        table.add_row(name, *cells)
        series[name] = [point for folder in folders for point in curve(folder, args.steps)]
    Console(width=180).print(table)
    draw(series, args.folder / "curves.svg")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def draw(series: dict[str, list[Point]], path: Path) -> None:
    """The curves as one SVG file, with what draws the documentation's."""
    sys.path.insert(0, str(ROOT / "docs"))
    from learning_curve import draw_curve

    draw_curve(
        series, path, f"Validation accuracy by answers generated ({PLAIN} a step)", "val/accuracy"
    )
    print(f"curves: {path}")


if __name__ == "__main__":
    main()
