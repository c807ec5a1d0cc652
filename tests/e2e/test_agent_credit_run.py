"""Credit over turns with an agent: its rewards of calls, in a whole run in one process, become its turns' advantages."""

import json
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pandas as pd
import pytest
from whole_run import assert_engine_and_trainer_agree, metrics_of, played_run

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
STEPS, GROUPS = 2, 6
DISCOUNT = 0.5


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return the folder of a run whose agent walks the maze, and is paid for each move."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        return played_run(
            tmp_path_factory.mktemp("paid"),
            "toy-maze",
            STEPS,
            f"data.rollout_batch_size={GROUPS}",
            "rollout.env_class=single_turn",
            f"rollout.agent.function={ROOT / 'tests/scripted_agents.py'}:paid_walk",
            "algorithm.credit=turn",
            f"algorithm.turn_discount={DISCOUNT}",
        )


@pytest.fixture(scope="module")
def table(run: Path) -> pd.DataFrame:
    """Return the recorded training trajectories, with lists of their turns' rewards and advantages."""
    table = pd.read_parquet(run / "trajectories").query("split == 'train'")
    assert len(table) == STEPS * 8 * GROUPS and table.error.isna().all()
    turns = [json.loads(text)["turns"] for text in table.turns]
    for name in ("reward", "advantage"):
        table[f"turn_{name}s"] = [[turn[name] for turn in facts] for facts in turns]
    return table


def test_turns_have_the_rewards_that_the_agent_gave(run: Path, table: pd.DataFrame) -> None:
    at_goal = 0
    for row in table.itertuples():
        metrics = json.loads(row.metrics)
        call_rewards = [metrics[f"paid_{k}"] for k in range(int(metrics["agent/calls"]))]
        *earlier_rewards, last_reward = call_rewards
        assert row.turn_rewards == [*earlier_rewards, last_reward + metrics["paid_at_goal"]]
        assert row.reward == sum(row.turn_rewards)
        if metrics["paid_at_goal"]:
            # However it got there, it came nearer by the length of the shortest path.
            assert row.reward == 0.5 + int(row.answer) / 16
            at_goal += 1
    assert at_goal > 3
    assert set(table.turn_rewards.explode()) == {-1 / 16, 0.0, 1 / 16, 1 / 16 + 0.5}
    rows = metrics_of(run)
    assert_engine_and_trainer_agree(rows, STEPS)
    for row in rows[1:]:
        rewards = table[table.step == row["step"]].reward
        assert row["reward/mean"] == pytest.approx(rewards.mean()) and row["actor/grad_norm"] > 0


def test_each_turn_is_compared_with_the_same_turn_of_others(table: pd.DataFrame) -> None:
    """Computed again from the formula in docs/credit.md; halves and sixteenths add up exactly."""
    differing = 0
    for _, group in table.groupby("group_id"):
        returns = [returns_of(rewards) for rewards in group.turn_rewards]
        for own_returns, advantages in zip(returns, group.turn_advantages, strict=True):
            expected = []
            for k, value in enumerate(own_returns):
                compared = [others[k] for others in returns if len(others) > k]
                tied = len(set(compared)) == 1
                scaled = 0.0 if tied else (value - mean(compared)) / (stdev(compared) + 1e-6)
                expected.append(scaled)
            np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-7)
            differing += len(set(advantages)) > 1
    assert differing > 0.9 * len(table), "turns of a trajectory differ"


def returns_of(rewards: list[float]) -> list[float]:
    """Return the discounted sum of rewards from each turn on."""
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + DISCOUNT * returns[-1])
    return returns[:0:-1]
