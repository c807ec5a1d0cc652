"""Planted shortcuts: does the split of the gain tell seeing from guessing?

Trains the toy on three data sets, with several seeds each, under the vision controls, and prints
what each run gained, seen and guessed:

- `neither`: the toy's own rows. Only the rectangle has the answer.
- `wording`: half of the rows ask for a perimeter, and their answer is 14 whatever the rectangle is: the
  word gives it away, and the picture says something else.
- `border`: a bar at one of the four edges of the picture has the answer. The rectangle is there, too,
  and says nothing.

    python benchmarks/did_it_look.py FOLDER --kinds neither,wording,border --seeds 1,2,3
"""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vl.toy.drawings import (
    CELL,
    GRID,
    QUESTIONS,
    Placement,
    all_placements,
    draw,
    held_out_placements,
    toy_rows,
    training_placements,
)

#: The answer that the wording gives away.
GIVEN_AWAY = 14
#: Answer of a bar at the left, right, top and bottom edge.
EDGE_ANSWERS = (14, 8, 20, 10)


def wording_rows(split: str) -> list[dict[str, Any]]:
    """Return the toy's area questions, and as many perimeter questions with one answer."""
    rng = np.random.default_rng([7, split == "train"])
    rows = [row for row in toy_rows(split) if QUESTIONS["area"] in row["problem"]]  # pyright: ignore[reportArgumentType]
    placements = training_placements() if split == "train" else held_out_placements()
    for number in range(len(rows)):
        placement = placements[rng.integers(len(placements))]
        row_id = f"wording-{split}-{placement}-{number}"
        rows.append(_row(row_id, draw(placement, rng), QUESTIONS["perimeter"], GIVEN_AWAY))
    return [rows[i] for i in rng.permutation(len(rows))]


def border_rows(split: str) -> list[dict[str, Any]]:
    """Return questions whose answer a bar at an edge tells, beside a rectangle that does not."""
    rng = np.random.default_rng([8, split == "train"])
    inner = [
        p
        for p in all_placements()
        if min(p.x, p.y) > 0 and max(p.x + p.width, p.y + p.height) < GRID
    ]
    rows = []
    for number in range(2400 if split == "train" else 152):
        placement: Placement = inner[rng.integers(len(inner))]
        picture, edge = draw(placement, rng), int(rng.integers(4))
        bar = (slice(None), slice(0, CELL)) if edge < 2 else (slice(0, CELL), slice(None))
        if edge % 2:
            bar = tuple(part if part == slice(None) else slice(-CELL, None) for part in bar)
        picture[bar] = (30, 30, 30)
        row_id = f"border-{split}-{placement}-{number}"
        rows.append(_row(row_id, picture, QUESTIONS["perimeter"], EDGE_ANSWERS[edge]))
    return rows


def _row(row_id: str, picture: np.ndarray, question: str, answer: int) -> dict[str, Any]:
    png = io.BytesIO()
    Image.fromarray(picture).save(png, format="PNG")
    return {
        "id": row_id,
        "problem": f"<image>{question}",
        "images": [{"bytes": png.getvalue(), "path": None}],
        "answer": f"\\boxed{{{answer}}}",
    }


ROWS = {"neither": toy_rows, "wording": wording_rows, "border": border_rows}


def write_data(folder: Path, kind: str) -> list[str]:
    """Write both splits, and return the overrides that name them."""
    overrides = []
    for split in ("train", "val"):
        path = folder / f"{kind}-{split}.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS[kind](split)), path)  # pyright: ignore[reportArgumentType]
        overrides.append(f"data.{split}_data_paths=[{path}]")
    return overrides


def train(folder: Path, kind: str, seed: int, steps: int, overrides: list[str]) -> dict[str, float]:
    """Train one run, and return the metrics of its last validation."""
    name = f"{kind}-{seed}"
    metrics = folder / name / "metrics.jsonl"
    if not metrics.exists():
        command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu"]
        command += write_data(folder, kind)
        command += [
            "cluster.backend=local",
            "data.vision_controls=[blank,swapped]",
            f"runner.max_steps={steps}",
            f"runner.val_check_interval={max(1, steps // 3)}",
            f"runner.save_interval={steps}",
            f"runner.seed={seed}",
            f"data.seed={seed}",
            f"runner.output_dir={folder}",
            f"runner.experiment_name={name}",
        ]
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row for row in rows if "val/gain_seen" in row][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", default="neither,wording,border")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*", help="of each run")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print("| data | seed | accuracy | blank | swapped | gain | seen | guessed |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for seed in map(int, arguments.seeds.split(",")):
        for kind in arguments.kinds.split(","):
            row = train(arguments.folder, kind, seed, arguments.steps, arguments.overrides)
            cells = [kind, str(seed)]
            for metric in ("val/accuracy", "val/accuracy_blank", "val/accuracy_swapped"):
                cells.append(f"{row[metric]:.2f}")
            for metric in ("val/gain", "val/gain_seen", "val/gain_guessed"):
                cells.append(f"{row[metric]:+.2f} ± {row[f'{metric}_stderr']:.2f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
