"""A whole run with an advantage and a loss from a file, KL in the reward, dynamic sampling and overlong shaping; and what follows
from its checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from whole_run import LOCAL

pytestmark = pytest.mark.e2e

OWN = """
import torch


def median(rewards, group_ids, tokens):
    out = torch.zeros_like(rewards)
    for group in group_ids.unique():
        out[group_ids == group] = rewards[group_ids == group] - rewards[group_ids == group].median()
    return out


def plain(inputs):
    assert len(inputs.segment_ids) == len(inputs.logprobs) == len(inputs.rollout_logprobs)
    return -inputs.advantages * (inputs.logprobs - inputs.old_logprobs).clamp(max=inputs.clip_high).exp()


def broken(logprobs, old_logprobs, advantages, segment_ids, clip_low, clip_high):
    raise KeyError("nothing here")
"""


def train(folder: Path, *overrides: str, expect: int = 0) -> str:
    settings = [
        f"runner.output_dir={folder}", "runner.max_steps=3", "runner.save_interval=2", "runner.val_check_interval=-1",
        "data.rollout_batch_size=8", "algorithm.n_minibatches=2", "runner.trajectories.groups=-1",
        "algorithm.kl_beta=0.05", "algorithm.kl_placement=reward", "algorithm.dynamic_sampling.enable=true",
        "algorithm.overlong.buffer=12", LOCAL,
    ]  # fmt: skip
    command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", *settings, *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines(folder: Path, name: str) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / f"toy-grpo-cpu/{name}.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return [f"algorithm.adv_type={path}:median", f"algorithm.loss_type={path}:plain"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, own) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder, *own)
    return folder


def test_advantages_are_the_files_of_rewards_less_penalty_and_kl(run):
    table = pd.read_parquet(run / "toy-grpo-cpu/trajectories").query("split == 'train'")
    first = table[table.step == 1]
    length = first.rollout_logprobs.map(len)
    # At step 1 policy and reference are one: no KL.
    paid = first.reward - (length - 12).clip(lower=0) / 12
    expected = paid - paid.groupby(first.group_id).transform(
        lambda group: np.sort(group)[(len(group) - 1) // 2]
    )
    assert first.advantage.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-4)
    rows = lines(run, "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert abs(rows[0]["actor/ref_kl"]) < 1e-5 < abs(rows[2]["actor/ref_kl"])
    assert rows[0]["reward/overlong_penalty"] > 0 and "actor/clip_fraction" not in rows[0]


def test_groups_that_tie_were_replaced(run):
    table = pd.read_parquet(run / "toy-grpo-cpu/trajectories").query("split == 'train'")
    for row, line in zip(lines(run, "metrics"), lines(run, "ledger"), strict=True):
        groups = table[table.step == row["step"]].groupby("group_id").reward
        assert len(groups) == len(line["groups"]) == 8 and set(groups.groups) == set(line["groups"])
        assert (groups.nunique() == 1).sum() == row["rollout/tied_groups_trained"]
        assert row["rollout/generated_groups"] == 8 + len(line.get("dropped_groups", []))
    assert sum(row["rollout/rounds"] for row in lines(run, "metrics")) > 3


def test_its_checkpoint_goes_on_to_the_same_numbers(run, own, tmp_path):
    train(tmp_path, *own, f"runner.resume_dir={run / 'toy-grpo-cpu/checkpoints/global_step_2'}")
    before, after = (
        {
            name: value
            for name, value in lines(folder, "metrics")[-1].items()
            if not name.endswith(("per_second", "_seconds")) and "time/" not in name
        }
        for folder in (run, tmp_path)
    )
    # Of a worker that has just begun.
    for name in (
        "rollout/engine_busy",
        "data/object_store_bytes",
    ):
        before.pop(name, None), after.pop(name, None)
    assert after == before
    assert lines(tmp_path, "ledger")[-1] == lines(run, "ledger")[-1]


def test_code_that_fails_ends_the_run_with_its_name(own, tmp_path):
    said = train(tmp_path, own[0], own[1].replace(":plain", ":broken"), expect=1)
    assert "own.py:broken failed: KeyError: 'nothing here'" in said
    assert "Traceback" not in said.split("own.py:broken failed")[-1]
