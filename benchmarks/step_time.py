"""Seconds of a step, predicted by `calibrate` and measured, for three tasks and three schedules.

    python benchmarks/step_time.py [--tasks toy maze small] [--schedules sync one_step_off async] [--json FILE]

For each task the machine is calibrated first, with the task's own model; then each schedule trains
some steps, with an engine and a rank on a slot each, and `prediction.json` of the run is held
against its steps: the medians without the first ones, and without checks, as the report compares
them. `small` is the model of 46 M parameters of the trainer benchmark, with random weights, on the
toy's questions with larger pictures, rewarded by chance.

The machine must be quiet: seconds are those of the clock. `busy` is the share of the cores that
other programs took just before a run. With --json, rows that the file has of other tasks and
schedules are kept, so that the nine can be measured one by one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from rlinf_vl.data.cache import build_once, cache_root, source_version
from rlinf_vl.preflight.prediction import PREDICTION
from rlinf_vl.report.predicted import WARM_UP, compare_prediction
from rlinf_vl.runtime.files import read_lines

sys.path.insert(0, str(Path(__file__).parent))
import workload

#: Config of each task, its steps, and its overrides.
TASKS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "toy": ("toy-grpo-cpu", 40, ()),
    "maze": ("toy-maze-cpu", 25, ()),
    "small": (
        "toy-grpo-cpu",
        20,
        (
            f"reward.reward_type={Path(__file__).resolve()}:by_chance",
            "data.rollout_batch_size=4",
            "algorithm.group_size=4",
            "runner.seq_length=1024",
        ),
    ),
}
SCHEDULES = ("sync", "one_step_off", "async")
#: Steps at the start that are left out: caches fill, and nothing is ahead yet.
FIRST_STEPS = 5
#: Overrides of every run: an engine and a rank on a slot each, and nothing that comes on some steps.
COMMON = (
    "cluster.component_placement={actor: 0, rollout: 1}",
    "runner.val_check_interval=-1",
    "runner.val_before_train=false",
    "runner.save_interval=-1",
    "runner.mismatch_check_interval=-1",
)


def by_chance(response: str, answer: str) -> float:
    """Pay about half of the responses, so that every group is trained on."""
    return float(sum(response.encode()) % 2)


def task_overrides(task: str) -> list[str]:
    """Return the overrides of a task; builds the model of 46 M parameters where it is missing."""
    overrides = [*COMMON, *TASKS[task][2]]
    if task == "small":
        folder = cache_root() / f"small-{source_version(workload.__file__)}"
        build_once(folder, lambda path: workload.write_model(path, "small"))
        overrides.append(f"rollout.model.model_path={folder}")
    return overrides


def calibrate(task: str) -> None:
    """Calibrate this machine with a task's model."""
    run_verb("calibrate", TASKS[task][0], *task_overrides(task))


def run_verb(verb: str, *arguments: str) -> None:
    """Run a verb in a process of its own; its messages are shown if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_vl", verb, *arguments], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{verb} failed:\n{done.stdout}{done.stderr}")


def measure(task: str, schedule: str, steps: int | None, folder: Path) -> dict[str, Any]:
    """Train a task with a schedule, and compare its steps with the prediction."""
    busy = psutil.cpu_percent(2.0) / 100
    overrides = [
        *task_overrides(task),
        f"runner.schedule={schedule}",
        f"runner.max_steps={steps or TASKS[task][1]}",
        f"runner.output_dir={folder}",
        "runner.experiment_name=run",
    ]
    run_verb("train", TASKS[task][0], *overrides)
    prediction = json.loads((folder / "run" / PREDICTION).read_text(encoding="utf-8"))
    rows = [row for row in read_lines(folder / "run/metrics.jsonl")[0] if row["step"]]
    compared = compare_prediction(prediction, rows[FIRST_STEPS - WARM_UP :])
    (whole,) = (row for row in compared if row.phase == "whole step")
    return {
        "task": task,
        "schedule": schedule,
        "predicted": whole.predicted,
        "measured": whole.measured,
        "phases": {
            row.phase: {"predicted": row.predicted, "measured": row.measured}
            for row in compared
            if row.phase != "whole step"
        },
        "spread": spread([row["time/step"] for row in rows[FIRST_STEPS:]]),
        "steps": len(rows) - FIRST_STEPS,
        "busy": busy,
        "date": datetime.now(UTC).date().isoformat(),
    }


def spread(seconds: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median."""
    first, median, third = statistics.quantiles(seconds, n=4)
    return (third - first) / median


def merged(path: Path, measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a file, those that were measured anew replaced, in the order of tasks."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    by_key = {(row["task"], row["schedule"]): dict(row) for row in [*rows, *measured]}
    order = [(task, schedule) for task in TASKS for schedule in SCHEDULES]
    return [by_key[key] for key in order if key in by_key]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--steps", type=int, help="of every run; else as many as its task has")
    parser.add_argument(
        "--skip-calibration", action="store_true", help="use the machine's last calibrations"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    measured: list[dict[str, Any]] = []
    table = Table("task", "schedule", "predicted s", "measured s", "difference", "spread", "busy")
    for task in args.tasks:
        if not args.skip_calibration:
            calibrate(task)
        for schedule in args.schedules:
            with tempfile.TemporaryDirectory(prefix="step-time-") as folder:
                row = measure(task, schedule, args.steps, Path(folder))
            measured.append(row)
            difference = row["predicted"] / row["measured"] - 1
            cells = [f"{row['predicted']:.3f}", f"{row['measured']:.3f}", f"{difference:+.0%}"]
            table.add_row(task, schedule, *cells, f"{row['spread']:.0%}", f"{row['busy']:.0%}")
            if args.json:
                rows = merged(args.json, measured)
                args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    Console(width=120).print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
