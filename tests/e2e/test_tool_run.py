"""Conversations with a tool as a whole run in one process: from a checkpoint that can write calls, and lies of the tool."""

import json
from pathlib import Path

import pandas as pd
import pytest
from whole_run import assert_engine_and_trainer_agree, metrics_of, played_run

pytestmark = pytest.mark.e2e

STEPS, GROUPS = 2, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The model writes calls and answers in the right form, and sees little."""
    folder = tmp_path_factory.mktemp("tool")
    return played_run(folder, "toy-tool", STEPS, f"data.rollout_batch_size={GROUPS}")


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict]:
    return metrics_of(run)


def test_engine_and_trainer_agree_over_turns(rows: list[dict]) -> None:
    assert_engine_and_trainer_agree(rows, STEPS)
    for row in rows[1:]:
        assert 2 < row["rollout/turns_mean"] <= row["rollout/turns_max"] <= 6


def test_rewards_are_those_of_first_and_second_answers(rows: list[dict]) -> None:
    for row in rows[1:]:
        first, correct = row["env/first_correct"], row["env/correct"]
        assert 0 < first < correct
        assert row["reward/mean"] == pytest.approx(first + 0.5 * (correct - first))
        assert row["env/tool_calls"] > 0.5
    for row in (rows[0], rows[-1]):
        assert (
            row["val/env/first_correct"]
            <= row["val/env/correct"]
            == pytest.approx(row["val/accuracy"])
        )


def test_calls_are_recorded_and_their_results_shown(run: Path) -> None:
    table = pd.read_parquet(run / "trajectories").query("split == 'train'")
    assert len(table) == STEPS * 8 * GROUPS
    calls = 0
    for turns, messages in zip(table.turns, table.messages, strict=True):
        told = [message for message in json.loads(messages)[0] if message["role"] == "user"][1:]
        shown = "".join(
            part for message in told for part in message["content"] if isinstance(part, str)
        )
        made = [call for turn in json.loads(turns)["turns"] for call in turn.get("tool_calls", [])]
        for call in made:
            if "error" in call:
                expected = "<tool_response>error: "
            else:
                a, b = call["arguments"]["a"], call["arguments"]["b"]
                expected = f"<tool_response>{a * b if call['name'] == 'multiply' else a + b}</tool_response>"
            assert expected in shown
        calls += len(made)
    assert calls > 8 * GROUPS
