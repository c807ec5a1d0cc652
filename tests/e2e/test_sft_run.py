"""Whole supervised runs: from Ray's two ranks and in one process, resumed, refused."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from whole_run import LOCAL, comparable

from rlinf_vl.__main__ import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

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
        ("sft", ["data.messages_key=chat"], "data.messages_key: column 'chat' not in toy-sft"),
    ],
)
def test_what_can_not_be_is_refused_with_its_key(capsys, verb, overrides, message):
    assert main([verb, "toy-sft-cpu", "--check", *overrides]) == 2
    assert message in capsys.readouterr().err
