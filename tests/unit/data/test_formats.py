"""Rows as the documentation of other systems shows them, recognised by their columns and read."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import FORMATS, RowFormat
from rlinf_vl.types import ImageRef, Problem


def png(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE = png("red"), png("blue")
QUESTION = "Find x in <image>."


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


#: Made as the named page or script makes them.
ROWS: dict[str, dict[str, Any]] = {
    # verl, examples/data_preprocess/geo3k.py
    "verl": {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x. Put it in \\boxed{}."}],
        "images": [{"bytes": RED, "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
    },
    # SkyRL, docs/tutorials/vision_language_rl and examples/train/geometry3k/geometry_3k_dataset.py
    "openai": {
        "prompt": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": uri(RED)}},
                    {"type": "text", "text": "Find x. Put it in \\boxed{}."},
                ],
            }
        ],
        "env_class": "geometry3k",
        "reward_spec": {"method": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "problem": "Find x.", "answer": "3"},
    },
    # EasyR1 and RLinf: hiyouga/geometry3k
    "rlinf": {
        "problem": "<image>Find x. Put it in \\boxed{}.",
        "images": [{"bytes": RED, "path": None}],
        "answer": "3",
    },
    # OpenRLHF, examples/scripts/train_vlm_math_hybrid_engine.sh
    "openrlhf": {
        "prompt": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find x. Put it in \\boxed{}."}]}
        ],
        "images": ["RED.png"],
        "label": "3",
    },
    # TRL, examples/scripts/grpo_vlm.py
    "trl": {
        "problem": "Find x. Put it in \\boxed{}.",
        "solution": "3",
        "prompt": [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": "Find x. Put it in \\boxed{}."},
        ],
        "image": {"bytes": RED, "path": None},
    },
}
#: What else of the row reaches environments and rewards.
COLUMNS = {
    "verl": {"data_source", "ability", "reward_model", "extra_info"},
    "openai": {"env_class", "reward_spec", "extra_info"},
    "rlinf": set(),
    "openrlhf": {"label"},
    "trl": {"problem", "solution"},
}


def open_rows(path: Path, rows: list[dict[str, Any]], **keys: Any) -> ProblemDataset:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return ProblemDataset([str(path)], "train", RowFormat(**keys))


def said(problem: Problem) -> list[str]:
    return [part.get("text", "IMAGE") for part in problem.messages[-1]["content"]]


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_a_documented_row_becomes_a_problem(tmp_path: Path, name: str, declared: bool) -> None:
    (tmp_path / "RED.png").write_bytes(RED)
    (problem,) = open_rows(tmp_path / "rows.parquet", [ROWS[name]], **({"format": name} if declared else {}))
    assert said(problem) == ["IMAGE", "Find x. Put it in \\boxed{}."]
    assert problem.images == (ImageRef.of(RED),) and problem.answer == "3" and problem.env_class is None
    assert set(problem.columns) == COLUMNS[name]
    if "extra_info" in problem.columns:
        assert problem.columns["extra_info"] == ROWS[name]["extra_info"]


def test_every_format_is_recognised_by_what_its_example_has() -> None:
    for name, row in ROWS.items():
        assert RowFormat().for_columns(row).format == name
    assert set(FORMATS) == {*ROWS, "folder"}
