"""Conversations with a tool as a whole run: real Ray, from a checkpoint that can write calls, and lies of the tool beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

pytestmark = pytest.mark.e2e

STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """After 90 supervised steps the model writes calls and answers in the right form, and sees little."""
    from rlinf_vl.toy.model import build_toy_checkpoint

    folder = tmp_path_factory.mktemp("tool")
    build_toy_checkpoint(folder / "model", progress=False, toy="toy-tool", steps=90)
    command = [sys.executable, "-m", "rlinf_vl", "train", "toy-tool-cpu", f"runner.output_dir={folder}"]
    command += [
        f"rollout.model.model_path={folder / 'model'}",
        f"runner.max_steps={STEPS}",
        f"runner.val_check_interval={STEPS}",
        "data.val_samples=24",
        "runner.save_interval=-1",
        "runner.max_tokens_per_mbs=2000",
        "runner.trajectories.train_groups=-1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "toy-tool-cpu"


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_engine_and_trainer_agree_over_turns(rows: list[dict]) -> None:
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5
        assert 0 < row["actor/rollout_train_abs_diff_max"] <= 2e-4
        assert row["rollout/errors"] == 0 and 2 < row["rollout/turns_mean"] <= row["rollout/turns_max"] <= 6


def test_rewards_are_those_of_first_and_second_answers(rows: list[dict]) -> None:
    for row in rows[1:]:
        first, correct = row["env/first_correct"], row["env/correct"]
        assert 0 < first < correct
        assert row["reward/mean"] == pytest.approx(first + 0.5 * (correct - first))
        assert row["env/tool_calls"] > 0.5
    for row in (rows[0], rows[-1]):
        assert row["val/env/first_correct"] <= row["val/env/correct"] == pytest.approx(row["val/accuracy"])


def test_calls_are_recorded_and_their_results_shown(run: Path) -> None:
    table = pd.read_parquet(run / "trajectories").query("split == 'train'")
    assert len(table) == STEPS * 128
    calls = 0
    for turns, messages in zip(table.turns, table.messages, strict=True):
        told = [message for message in json.loads(messages)[0] if message["role"] == "user"][1:]
        shown = "".join(part for message in told for part in message["content"] if isinstance(part, str))
        made = [call for turn in json.loads(turns)["turns"] for call in turn.get("tool_calls", [])]
        for call in made:
            if "error" in call:
                expected = "<tool_response>error: "
            else:
                a, b = call["arguments"]["a"], call["arguments"]["b"]
                expected = f"<tool_response>{a * b if call['name'] == 'multiply' else a + b}</tool_response>"
            assert expected in shown
        calls += len(made)
    assert calls > 128
