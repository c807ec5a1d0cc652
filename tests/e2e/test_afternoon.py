"""A stranger's afternoon: pictures, a table of questions and a reward of their own, a config outside the repository, every verb."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from whole_run import LOCAL

pytestmark = pytest.mark.e2e

CONFIG = """# Which shape is it?
defaults: [toy-grpo-cpu]
runner:
  experiment_name: shapes
  output_dir: runs
  max_steps: 5
  save_interval: 5
  val_check_interval: 5
data:
  train_data_paths: questions.csv
  val_data_paths: questions.csv
  prompt_key: question
  answer_key: correct
  image_keys: picture
  image_root: pictures
  rollout_batch_size: 6
  val_samples: 6
algorithm:
  group_size: 4
reward:
  functions:
    - {function: letters.py:letter_of, weight: 1.0}
    - {function: letters.py:brief, weight: 0.1}
"""
REWARD = r"""
from wording import chosen  # a file beside this one


def letter_of(response, answer, **row):
    price = f"${len(row['shape'])}"  # what a column says; a dollar sign is no reference to a key
    return {"score": float(chosen(response) == answer), "chose": float(chosen(response) is not None), "price": len(price)}


def brief(response, answer):
    return 1.0 / (1 + len(response))
"""
WORDING = """import re


def chosen(response):
    letters = re.findall(r"[A-D]", response)
    return letters[-1] if letters else None
"""
SHAPES = ("circle", "square", "triangle")


@pytest.fixture(scope="module")
def afternoon(tmp_path_factory) -> Path:
    """What the stranger has: 30 PNGs, a CSV, two files of Python, a config."""
    folder = tmp_path_factory.mktemp("afternoon")
    (folder / "pictures").mkdir()
    rows = []
    for i in range(30):
        shape, at = SHAPES[i % 3], 6 + i % 7
        image = Image.new("RGB", (48, 48), "white")
        draw, box = ImageDraw.Draw(image), (at, at, at + 28, at + 28)
        if shape == "circle":
            draw.ellipse(box, fill=(i * 8, 40, 90))
        elif shape == "square":
            draw.rectangle(box, fill=(i * 8, 40, 90))
        else:
            draw.polygon([(at, at + 28), (at + 28, at + 28), (at + 14, at)], fill=(i * 8, 40, 90))
        image.save(folder / f"pictures/{i:02}.png")
        text = '"What is this, A: circle, B: square or C: triangle?"'
        rows.append(f"{i:02}.png,{text},{'ABC'[i % 3]},{shape}")
    (folder / "questions.csv").write_text(
        "\n".join(["picture,question,correct,shape", *rows]) + "\n"
    )
    (folder / "shapes.yaml").write_text(CONFIG)
    (folder / "letters.py").write_text(REWARD)
    (folder / "wording.py").write_text(WORDING)
    return folder


def rlinf_vl(folder: Path, *words: str, expect: int = 0) -> str:
    """What a command says, started in the stranger's folder."""
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_vl", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_afternoon(afternoon):
    said = rlinf_vl(
        afternoon, "check-data", "shapes.yaml", "--output", "data.html", "--workers", "1"
    )
    assert "30" in said and (afternoon / "data.html").stat().st_size > 10_000
    assert "GiB" in rlinf_vl(
        afternoon, "preflight", "shapes.yaml", "cluster.device=cuda", "--gpus", "2"
    )

    rlinf_vl(afternoon, "train", "shapes.yaml")
    run = afternoon / "runs/shapes"
    steps = metrics(run)
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4, 5]
    for row in steps[1:]:
        assert row["reward/letter_of.price"] >= len("$6") and 0 < row["reward/brief"] < 1
    table = pd.read_parquet(run / "trajectories")
    train = table[table.split == "train"]
    letters = train.response.str.findall("[A-D]").str[-1]
    worth = (letters == train.answer).astype(float) + 0.1 / (1 + train.response.str.len())
    assert train.reward.to_numpy() == pytest.approx(worth.to_numpy(), abs=1e-4)

    said = rlinf_vl(
        afternoon,
        "eval",
        "shapes.yaml",
        "checkpoint=runs/shapes",
        "--by",
        "shape",
        "--samples",
        "2",
    )
    assert all(shape in said for shape in SHAPES)

    rlinf_vl(
        afternoon,
        "train",
        "shapes.yaml",
        LOCAL,
        "runner.experiment_name=longer",
        "runner.max_steps=2",
        "reward.functions=[{function: math}]",
    )
    rlinf_vl(afternoon, "report", "runs/shapes", "runs/longer", "--output", "both.html")
    page = (afternoon / "both.html").read_text()
    assert "shapes" in page and "longer" in page

    (afternoon / "letters.py").unlink()  # the run has its text
    (afternoon / "wording.py").unlink()
    said = rlinf_vl(
        afternoon,
        "train",
        "runs/shapes/config.yaml",
        LOCAL,
        "runner.resume_dir=auto",
        "runner.max_steps=6",
    )
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3, 4, 5, 6]

    rlinf_vl(afternoon, "export", "runs/shapes", "model", "--dtype", "fp32")
    model = AutoModelForImageTextToText.from_pretrained(afternoon / "model")
    tokenizer = AutoTokenizer.from_pretrained(afternoon / "model")
    pictures = AutoImageProcessor.from_pretrained(afternoon / "model")
    image = Image.open(afternoon / "pictures/00.png").convert("RGB")
    pixels = pictures(images=[image], return_tensors="pt")
    slots = int(pixels["image_grid_thw"].prod()) // pictures.merge_size**2
    content = [
        {"type": "image"},
        {"type": "text", "text": "What is this, A: circle, B: square or C: triangle?"},
    ]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    text = re.sub(r"<\|image_pad\|>", "<|image_pad|>" * slots, text)
    ids = tokenizer(text, return_tensors="pt")
    kinds = (ids["input_ids"] == model.config.image_token_id).int()
    with torch.no_grad():
        answer = model.generate(
            **ids, **pixels, mm_token_type_ids=kinds, max_new_tokens=8, do_sample=False
        )
    assert tokenizer.decode(
        answer[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
    ).strip()
