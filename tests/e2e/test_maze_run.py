"""The maze as a whole run in one process: conversations with a picture in every turn, credited by state, from a checkpoint that can
write answers."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from whole_run import assert_engine_and_trainer_agree, metrics_of, played_run

from rlinf_vl.algorithms import gigpo_advantages
from rlinf_vl.extras.toy.maze import Position

pytestmark = pytest.mark.e2e

STEPS, GROUPS = 2, 6
WEIGHT, DISCOUNT = 0.5, 0.9


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The model writes answers in the right form, and is there one time in five."""
    folder = tmp_path_factory.mktemp("maze")
    return played_run(
        folder,
        "toy-maze",
        STEPS,
        f"data.rollout_batch_size={GROUPS}",
        "actor.optim.lr_warmup_steps=0",
        f"algorithm.state_advantage_weight={WEIGHT}",
        f"algorithm.turn_discount={DISCOUNT}",
        "algorithm.loss_agg_func=seq-mean-token-mean",
    )


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict]:
    return metrics_of(run)


def test_engine_and_trainer_agree_over_turns(rows: list[dict]) -> None:
    assert_engine_and_trainer_agree(rows, STEPS)
    assert max(row["actor/grad_norm"] for row in rows[1:]) > 0, (
        "somebody reached the goal, and others did not"
    )


def test_what_the_environment_measures_are_metrics(rows: list[dict]) -> None:
    for row in rows[1:]:
        assert row["env/success"] == pytest.approx(row["reward/mean"])
        assert row["env/turns"] == pytest.approx(row["rollout/turns_mean"])
        assert 1 <= row["env/turns"] <= row["rollout/turns_max"] == 6 and row["env/bumps"] > 0
    for row in (rows[0], rows[-1]):
        assert row["val/env/success"] == pytest.approx(row["val/accuracy"])


def test_every_turn_shows_the_state_that_it_is_answered_in(run: Path) -> None:
    table = pd.read_parquet(run / "trajectories").query("split == 'train'")
    assert len(table) == STEPS * 8 * GROUPS
    pictures = {
        path: np.asarray(Image.open(run / path))
        for path in {path for paths in table.images for path in paths}
    }
    for paths, turns, messages in zip(table.images, table.turns, table.messages, strict=True):
        states = [turn["state"] for turn in json.loads(turns)["turns"]]
        shown = [
            message["content"][0]
            for message in json.loads(messages)[0]
            if message["role"] == "user"
        ]
        assert len(shown) == len(states) <= 6
        for number, state in zip(shown, states, strict=True):
            assert (pictures[paths[number]] == Position.of_text(state).picture()).all()


def test_each_turn_is_trained_on_with_its_own_advantage(run: Path, rows: list[dict]) -> None:
    """Computed again from what was written down."""
    table = pd.read_parquet(run / "trajectories").query("split == 'train'")
    turns = [
        (group, (group, sample), turn)
        for group, sample, found in zip(table.group_id, table["sample"], table.turns, strict=True)
        for turn in json.loads(found)["turns"]
    ]
    groups, whose, facts = map(list, zip(*turns, strict=True))
    rewards = torch.tensor([turn["reward"] for turn in facts], dtype=torch.float64)
    states = [turn["state"] for turn in facts]
    expected = gigpo_advantages(rewards, whose, groups, states, weight=WEIGHT, discount=DISCOUNT)
    torch.testing.assert_close(
        torch.tensor([turn["advantage"] for turn in facts], dtype=torch.float64), expected
    )
    assert expected.unique().numel() > 4, "turns of a trajectory differ"
    for row in rows[1:]:
        assert 1 / row["rollout/turns_mean"] <= row["reward/shared_states"] <= 1
