"""Planted shortcuts: do vision controls and heat maps tell seeing from guessing?

Trains the toy on four data sets, with several seeds each, under the vision controls. Prints what
each run gained, seen and guessed, and where the heat maps of its validation answers lie:

- `neither`: the toy's own rows. Only the rectangle has the answer.
- `wording`: half of the rows ask for a perimeter, and their answer is 14 whatever the rectangle is: the
  word gives it away, and the picture says something else.
- `border`: a bar at the left or the top edge of the picture, or none, has the answer. The rectangle is
  there, too, and says nothing.
- `unrelated`: the toy's own rows, each training picture that of another row. There is nothing to see.

    python benchmarks/did_it_look.py FOLDER --kinds neither,wording,border,unrelated --seeds 1,2,3

A run that was interrupted goes on where it stopped.
"""

import argparse
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vl.extras.toy.drawings import (
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
from rlinf_vl.tools.report.look.main import SAYS_SOMETHING, look
from rlinf_vl.tools.report.look.occlusion import edge_share
from rlinf_vl.tools.report.look_files import look_file

#: The answer that the wording gives away.
GIVEN_AWAY = 14
#: Cells of the bar at the left or the top edge, by the answer that it means; no bar means NO_BAR.
EDGES: dict[int, tuple[slice, slice]] = {
    14: (slice(None), slice(0, 1)),
    20: (slice(0, 1), slice(None)),
}
NO_BAR = 10


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
    """Return questions whose answer a bar at an edge tells, beside a rectangle that does not.

    A third of the pictures has no bar: without them one of the bars would mean the answer that the
    policy gives anyway, and hiding it would change nothing.
    """
    rng = np.random.default_rng([8, split == "train"])
    inner = [
        p
        for p in all_placements()
        if min(p.x, p.y) > 0 and max(p.x + p.width, p.y + p.height) < GRID
    ]
    rows = []
    for number in range(2400 if split == "train" else 152):
        placement: Placement = inner[rng.integers(len(inner))]
        picture = draw(placement, rng)
        answer = (NO_BAR, *EDGES)[rng.integers(1 + len(EDGES))]
        if answer in EDGES:
            picture[_in_pixels(EDGES[answer])] = (30, 30, 30)
        row_id = f"border-{split}-{placement}-{number}"
        rows.append(_row(row_id, picture, QUESTIONS["perimeter"], answer))
    return rows


def _in_pixels(cells: tuple[slice, slice]) -> tuple[slice, ...]:
    return tuple(slice(*(n * CELL for n in part.indices(GRID)[:2])) for part in cells)


def unrelated_rows(split: str) -> list[dict[str, Any]]:
    """Return the toy's own rows; each training row has the picture of another one."""
    rows = toy_rows(split)  # pyright: ignore[reportArgumentType]
    if split == "train":
        order = np.random.default_rng(9).permutation(len(rows))
        pictures = [rows[i]["images"] for i in order]
        rows = [row | {"images": images} for row, images in zip(rows, pictures, strict=True)]
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


ROWS = {
    "neither": toy_rows,
    "wording": wording_rows,
    "border": border_rows,
    "unrelated": unrelated_rows,
}

#: Steps of training. To read the bar, or to look at nothing, takes longer: both are far from what
#: the checkpoint does.
STEPS = {"neither": 60, "wording": 60, "border": 90, "unrelated": 120}


def write_data(folder: Path, kind: str) -> list[str]:
    """Write both splits, and return the overrides that name them."""
    overrides = []
    for split in ("train", "val"):
        path = folder / f"{kind}-{split}.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS[kind](split)), path)  # pyright: ignore[reportArgumentType]
        overrides.append(f"data.{split}_data_paths=[{path}]")
    return overrides


def train(folder: Path, kind: str, seed: int, steps: int, overrides: list[str]) -> dict[str, float]:
    """Train one run unless it is done, and return the metrics of its last validation."""
    run = folder / f"{kind}-{seed}"
    row = _last_validation(run, steps)
    if row is None:
        command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu"]
        command += write_data(folder, kind)
        command += [
            "cluster.backend=local",
            "data.vision_controls=[blank,swapped,cropped]",
            f"runner.max_steps={steps}",
            f"runner.val_check_interval={steps}",
            f"runner.save_interval={steps}",
            f"runner.seed={seed}",
            "runner.resume_dir=auto",
            f"data.seed={seed}",
            f"runner.output_dir={folder}",
            f"runner.experiment_name={run.name}",
        ]
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
        row = _last_validation(run, steps)
    if row is None:
        raise SystemExit(f"{run} has no validation of step {steps}: it was stopped; run this again")
    return row


def _last_validation(run: Path, steps: int) -> dict[str, float] | None:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    validations = [row for row in rows if row["step"] == steps and "val/gain_seen" in row]
    return validations[-1] if validations else None


def split_cells(row: dict[str, float]) -> list[str]:
    """Return the cells of a run in the table of the split."""
    names = ("accuracy", "accuracy_blank", "accuracy_swapped", "accuracy_cropped")
    cells = [f"{row[f'val/{name}']:.2f}" for name in names]
    for name in ("gain", "gain_seen", "gain_guessed", "gain_seen_swapped", "gain_guessed_swapped"):
        cells.append(f"{row[f'val/{name}']:+.2f} ± {row[f'val/{name}_stderr']:.2f}")
    return cells


class AnswerMap(NamedTuple):
    """The heat map of a validation answer.

    Attributes:
        question: "area" or "perimeter".
        values: [GRID, GRID] nats; a patch is a cell.
        targets: name → bool [GRID, GRID], the patches of "rectangle" and, in its data set, "bar".
    """

    question: str
    values: np.ndarray
    targets: dict[str, np.ndarray]


def answer_maps(run: Path, steps: int, n: int, forwards: int = 80) -> list[AnswerMap]:
    """Return the heat maps of a run's first `n` recorded validation answers."""
    file = look_file(run, steps)
    if not file.exists():
        look(run, steps, heat_maps=n, forwards=forwards)
    columns = ["split", "group_id", "labels", "answer"]
    trajectories = pq.read_table(run / f"trajectories/step_{steps}.parquet", columns=columns)
    by_group = {row["group_id"]: row for row in trajectories.to_pylist() if row["split"] == "val"}
    maps = []
    for row in pq.read_table(file).to_pylist()[:n]:
        (heat_map,) = json.loads(row["heat_maps"])
        trajectory = by_group[row["group_id"]]
        row_id = json.loads(trajectory["labels"])["id"]
        question = "area" if "-area-" in row_id else "perimeter"
        targets = {"rectangle": rectangle_patches(row_id)}
        if run.name.startswith("border"):
            targets["bar"] = bar_patches(trajectory["answer"])
        maps.append(AnswerMap(question, np.array(heat_map["values"]), targets))
    return maps


def rectangle_patches(row_id: str) -> np.ndarray:
    """Return the patches of the rectangle that a row's id names."""
    match = re.search(r"(\d)x(\d)at(\d),(\d)", row_id)
    assert match is not None, row_id
    width, height, x, y = map(int, match.groups())
    patches = np.zeros((GRID, GRID), bool)
    patches[y : y + height, x : x + width] = True
    return patches


def bar_patches(answer: str) -> np.ndarray:
    """Return the patches of the bar that means an answer, `\\boxed{14}` for one; none of NO_BAR."""
    patches = np.zeros((GRID, GRID), bool)
    cells = EDGES.get(int(re.sub(r"\D", "", answer)))
    if cells is not None:
        patches[cells] = True
    return patches


def map_cells(maps: list[AnswerMap], target: str) -> list[str]:
    """Return the cells of some maps and a target in the table of the pointing game."""
    sums = np.array([np.maximum(answer_map.values, 0).sum() for answer_map in maps])
    hits = np.array([_peak_is_in(answer_map, target) for answer_map in maps])
    chance = np.array([answer_map.targets[target].mean() for answer_map in maps])
    telling = sums >= SAYS_SOMETHING
    cells = [str(len(maps)), f"{np.median(sums):.2g}", f"{telling.mean():.2f}"]
    if telling.any():
        shares = [edge_share(maps[number].values) for number in np.flatnonzero(telling)]
        cells += [f"{value:.2f}" for value in (hits[telling].mean(), chance[telling].mean())]
        cells.append(f"{np.mean(shares):.2f}")
    else:
        cells += ["–"] * 3
    return cells


def _peak_is_in(answer_map: AnswerMap, target: str) -> bool:
    return bool(answer_map.targets[target].reshape(-1)[answer_map.values.argmax()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", default=",".join(ROWS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, help="of each run; unless given, those of STEPS")
    parser.add_argument("--maps", type=int, default=64, help="heat maps of a run; 0 for none")
    parser.add_argument("overrides", nargs="*", help="of each run")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    kinds, seeds = arguments.kinds.split(","), list(map(int, arguments.seeds.split(",")))
    runs = [(kind, seed) for kind in kinds for seed in seeds]

    print("| data | seed | accuracy | blank | swapped | cropped | gain | seen, by blank ", end="")
    print("| guessed, by blank | seen, by swapped | guessed, by swapped |")
    print(f"|{'---|' * 11}", flush=True)
    for kind, seed in runs:
        steps = arguments.steps or STEPS[kind]
        row = train(arguments.folder, kind, seed, steps, arguments.overrides)
        print(f"| {kind} | {seed} | {' | '.join(split_cells(row))} |", flush=True)
    if not arguments.maps:
        return

    print("\n| data | question | target | seed | maps | nats, median ", end="")
    print(f"| share ≥ {SAYS_SOMETHING} nats | peak on the target | chance | share at the edges |")
    print(f"|{'---|' * 10}", flush=True)
    for kind, seed in runs:
        steps = arguments.steps or STEPS[kind]
        maps = answer_maps(arguments.folder / f"{kind}-{seed}", steps, arguments.maps)
        for question in sorted({answer_map.question for answer_map in maps}):
            chosen = [answer_map for answer_map in maps if answer_map.question == question]
            # A picture without a bar has no place to point at.
            chosen = [m for m in chosen if all(patches.any() for patches in m.targets.values())]
            for target in chosen[0].targets:
                cells = " | ".join(map_cells(chosen, target))
                print(f"| {kind} | {question} | {target} | {seed} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
