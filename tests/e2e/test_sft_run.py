"""Whole supervised runs: from Ray's two ranks and in one process, resumed, refused."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from whole_run import LOCAL, comparable

from rlinf_vl.__main__ import main

pytestmark = pytest.mark.e2e

SMALL = [
    "runner.max_steps=4",
    "runner.save_interval=2",
    "runner.val_check_interval=2",
    "data.val_samples=24",
    "data.rollout_batch_size=8",
]


def sft(folder: Path, *overrides: str) -> Path:
    """Train by the command line; the run's folder."""
    command = [sys.executable, "-m", "rlinf_vl", "sft", "toy-sft-cpu", *SMALL, *overrides]
    done = subprocess.run(
        [*command, f"runner.output_dir={folder}"],
        capture_output=True,
        text=True,
        timeout=800,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "toy-sft-cpu"


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    return sft(tmp_path_factory.mktemp("local"), LOCAL)


def test_a_run_learns_validates_and_records_what_it_imitates(local):
    rows = comparable(local)
    assert list(rows) == [0, 1, 2, 3, 4]
    assert rows[4]["val/loss"] < rows[2]["val/loss"] < rows[0]["val/loss"]
    assert rows[4]["actor/loss"] < rows[1]["actor/loss"]
    assert {"val/accuracy", "val/problems"} <= rows[4].keys()
    assert not [name for name in rows[4] if name.startswith("reward/")]
    names = {path.name for path in local.iterdir()}
    assert {"report.html", "config.yaml", "trajectories", "tensorboard"} <= names
    table = pd.read_parquet(local / "trajectories")
    trained = table[table["split"] == "train"]
    assert len(trained) == 4 * 4 and (trained["advantage"] == 1).all()
    assert trained["response"].str.fullmatch(r".*\\boxed\{\d+\}").all()
    assert json.loads((local / "status.json").read_text())["state"] == "done"


def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_with_the_same_numbers(local, tmp_path):
    checkpoint = local / "checkpoints/global_step_2"
    resumed = comparable(sft(tmp_path, LOCAL, f"runner.resume_dir={checkpoint}"))
    whole = comparable(local)
    assert {step: resumed[step] for step in (3, 4)} == {step: whole[step] for step in (3, 4)}


def test_two_ranks_on_ray_have_the_numbers_of_one_process(local, tmp_path):
    one, two = comparable(local), comparable(sft(tmp_path))
    assert one.keys() == two.keys()
    for step in one:
        for name in {"actor/loss", "actor/grad_norm", "val/loss", "val/tokens"} & one[step].keys():
            assert two[step][name] == pytest.approx(one[step][name], rel=1e-5), (step, name)


def test_a_trained_checkpoint_is_exported_and_reinforcement_learning_begins_with_it(
    local, tmp_path
):
    assert main(["export", str(local), str(tmp_path / "start"), "--dtype", "fp32"]) == 0
    overrides = [LOCAL, "runner.max_steps=1", "data.rollout_batch_size=4", "data.val_samples=8"]
    overrides += [f"rollout.model.model_path={tmp_path / 'start'}"]
    overrides += [f"runner.output_dir={tmp_path}", "runner.save_interval=-1"]
    command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    # Engine and trainer agree on the exported weights.
    row = comparable(tmp_path / "toy-grpo-cpu")[1]
    assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5


@pytest.mark.parametrize(
    "verb, overrides, message",
    [
        ("train", [], "data.messages_key: messages is for conversations to imitate"),
        ("sft", ["data.prompt_suffix=' Answer.'"], "data.prompt_suffix: ' Answer.', but a conver"),
        ("sft", ["data.overlong=cut"], "data.overlong: cut would take from what is imitated"),
        ("sft", ["data.val_data_paths=[]"], "data.sample_val: true without data.val_data_paths"),
        ("sft", ["data.prompt_key=ask"], "data.prompt_key: column 'ask' not in toy-sft"),
        ("sft", ["data.messages_key=chat"], "data.messages_key: column 'chat' not in toy-sft"),
    ],
)
def test_what_can_not_be_is_refused_with_its_key(capsys, verb, overrides, message):
    assert main([verb, "toy-sft-cpu", "--check", *overrides]) == 2
    assert message in capsys.readouterr().err


def test_the_losses_of_the_first_steps_are_those_of_transformers(tmp_path):
    """Transformers' own forward gets the data set's rows, in their order, padded."""
    from dataclasses import replace
    from io import BytesIO

    import numpy as np
    import torch
    from demonstration_batch import demonstration_batch
    from PIL import Image
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
    from rlinf_vl.extras.toy.demonstrations import TOY, demonstration_rows
    from rlinf_vl.extras.toy.model import new_toy_model

    steps, lr = 3, 5e-4
    overrides = [LOCAL, "data.shuffle=false", "data.rollout_batch_size=32", "data.sample_val=false"]
    overrides += ["runner.val_check_interval=-1", "runner.save_interval=-1"]
    overrides += [f"runner.max_steps={steps}", "actor.optim.lr_scheduler=constant"]
    overrides += [f"actor.optim.lr={lr}", "actor.optim.lr_warmup_steps=0"]
    rows = comparable(sft(tmp_path, *overrides))
    folder = toy_checkpoint_path("toy-sft")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    data_rows, model = iter(demonstration_rows("train")), new_toy_model(TOY, 1)

    def conversation(rng):
        row = next(data_rows)
        question, answer = json.loads(row["messages"])
        picture = np.asarray(Image.open(BytesIO(row["images"][0]["bytes"])))
        text = {"type": "text", "text": question["content"].removeprefix("<image>")}
        return [[question | {"content": [{"type": "image", "image": picture}, text]}, answer]]

    task, rng = replace(TOY, demonstrate=conversation), np.random.default_rng()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, steps + 1):
        batch = demonstration_batch(task, tokenizer, processor, 32, rng)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert rows[step]["actor/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert rows[step]["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
