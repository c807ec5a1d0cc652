"""A whole run on rows of every format at once, as a mixture with a curriculum and questions in two wordings; resumed after its first
step, it does what it would have done."""

import base64
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf_vl.extras.toy.task import toy_dataset_path
from tests.whole_run import LOCAL, comparable

pytestmark = pytest.mark.e2e

#: An environment that fails where a row's other columns don't reach it.
PROBE = """
from dataclasses import replace

from rlinf_vl.envs.single_turn import SingleTurn

class Probe(SingleTurn):
    def start(self, problem):
        columns, stem = problem.columns, problem.id.partition(":")[0]
        (user,) = [message for message in problem.messages if message["role"] == "user"]
        said = "".join(part.get("text", "") for part in user["content"])
        assert [part["type"] for part in user["content"]].count("image_url") == 1 and len(problem.images) == 1
        assert said.startswith("Look: ") or said.endswith(" Look closely."), said
        if stem == "verl":
            assert columns["data_source"] == "toy" and columns["extra_info"]["index"] >= 0
            assert columns["reward_model"] == {"style": "rule", "ground_truth": problem.answer}
        elif stem == "skyrl":
            assert columns["env_class"] == "geometry3k" and columns["reward_spec"]["ground_truth"] == problem.answer
        else:
            assert stem in ("trl", "openrlhf", "pictures", "table"), stem
            assert stem not in ("trl", "openrlhf") or problem.answer in (columns.get("solution"), columns.get("label"))
        return super().start(problem)

    def step(self, response):  # every group has something to learn from
        result = super().step(response)
        return replace(result, reward=result.reward + len(response) / 100)
"""


def made_in(folder: Path, row: dict[str, Any], i: int, kind: str) -> dict[str, Any]:
    """A row of the toy as another system writes it; its image lies in the folder where that names files."""
    text, answer, image = (
        row["problem"].replace("<image>", ""),
        row["answer"],
        row["images"][0]["bytes"],
    )
    name, level = f"{kind}-{i}.png", {"level": i % 3}
    if kind in ("openrlhf", "table", "pictures"):
        (folder / name).write_bytes(image)
    return {
        "verl": {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": "<image>" + text}],
            "images": [{"bytes": image, "path": None}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": i, "answer": answer, "question": text},
        },
        "skyrl": {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {
                                "url": f"data:image/png;base64,{base64.b64encode(image).decode()}"
                            },
                        },
                        {"type": "text", "text": text},
                    ],
                }
            ],
            "env_class": "geometry3k",
            "reward_spec": {"method": "rule", "ground_truth": answer},
        },
        "trl": {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": text},
            ],
            "image": {"bytes": image, "path": None},
            "solution": answer,
        },
        "openrlhf": {
            "prompt": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
            ],
            "images": [name],
            "label": answer,
        },
        "table": {"problem": text, "image": name, "answer": answer},
        "pictures": {"file_name": name, "problem": text, "answer": answer},
    }[kind] | level


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    if kind in ("table", "pictures"):
        path = folder / ("metadata.csv" if kind == "pictures" else "table.csv")
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif kind == "openrlhf":
        path = folder / "openrlhf.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path = folder / f"{kind}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(folder if kind == "pictures" else path)


def train(*arguments: str) -> None:
    command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", LOCAL, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_of_every_format_train_two_steps_and_go_on_as_if_nothing_had_been(tmp_path):
    toy = pq.read_table(toy_dataset_path("train", "toy")).slice(0, 60).to_pylist()
    (tmp_path / "probe.py").write_text(PROBE)
    paths = []
    for k, kind in enumerate(("verl", "skyrl", "trl", "openrlhf", "table", "pictures")):
        folder = tmp_path / kind
        folder.mkdir()
        paths.append(
            write(
                folder,
                kind,
                [made_in(folder, row, i, kind) for i, row in enumerate(toy[10 * k : 10 * k + 10])],
            )
        )
    overrides = [
        f"data.train_data_paths=[{','.join(paths)}]",
        "data.val_data_paths=[]",
        "data.weights=[2,1,1,1,1,2]",
        "data.curriculum_key=level",
        "data.prompt_variants=['Look: {problem}','{problem} Look closely.']",
        "data.image_only_mode=true",
        "data.max_images_per_sample=1",
        "data.rollout_batch_size=8",
        "data.max_bad_rows=0",
        "algorithm.group_size=8",
        f"rollout.env_class={tmp_path}/probe.py:Probe",
        "runner.val_check_interval=-1",
        "runner.save_interval=1",
        "runner.max_steps=2",
    ]
    train(f"runner.output_dir={tmp_path}/whole", *overrides)
    whole = tmp_path / "whole/toy-grpo-cpu"
    assert not (whole / "bad_rows.jsonl").exists() or not (whole / "bad_rows.jsonl").read_text()
    metrics = comparable(whole)
    assert not any(row["rollout/errors"] for row in metrics.values()), "columns are missing"
    assert set(metrics) == {1, 2} and all(row["actor/grad_norm"] > 0 for row in metrics.values())
    assert all(
        (row["data/dropped_images"], row["data/text_only_rows"]) == (0, 0)
        for row in metrics.values()
    )
    groups = [json.loads(line) for line in (whole / "ledger.jsonl").read_text().splitlines()]
    assert all(toy_row % 10 % 3 == 0 for step in groups for toy_row in step["rows"]), (
        "easy ones first"
    )
    assert [sorted(row // 10 for row in step["rows"]) for step in groups] == [
        [0, 0, 1, 2, 3, 4, 5, 5]
    ] * 2

    train(
        f"runner.output_dir={tmp_path}/resumed",
        f"runner.resume_dir={whole}/checkpoints/global_step_1",
        *overrides,
    )
    # The engine decodes while the environment is called: the time says which answers are decoded together, and that the last digits.
    resumed, noisy = (
        comparable(tmp_path / "resumed/toy-grpo-cpu")[2],
        "actor/rollout_train_abs_diff_max",
    )
    # Of last digits, the largest.
    assert resumed.pop(noisy) == pytest.approx(metrics[2].pop(noisy), abs=1e-5)
    assert resumed == pytest.approx(metrics[2], rel=1e-5, abs=1e-6)
