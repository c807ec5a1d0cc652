"""Agents as whole runs: the maze played by an agent's function is trained on as the maze played by the run itself."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from whole_run import assert_engine_and_trainer_agree, metrics_of, played_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
AGENT = (
    "rollout.env_class=single_turn",
    f"rollout.agent.function={ROOT / 'examples/agents/maze.py'}:solve",
)
#: What depends on time, or on the order in which requests arrive.
APART = ("time/", "memory/", "sync/", "agent/", "val/agent/", "rollout/engine_busy")


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    """Everything but times: the last digits of a logprob depend on who shares a batch."""
    for own, other in zip(ours, theirs, strict=True):
        names = [name for name in other if not name.startswith(APART) and "second" not in name]
        assert len(names) > 5 and own.keys() >= set(names)
        for name in names:
            loose = "diff" in name or "kl" in name or "k3" in name or "bytes" in name
            if not loose and "ratio" not in name:
                np.testing.assert_allclose(
                    own[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name
                )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[list[dict], list[dict]]:
    """The steps of the run that an agent plays, and of the one that the environment plays."""
    rows = []
    for name, overrides in (("agent", AGENT), ("environment", ())):
        folder = tmp_path_factory.mktemp(name)
        rows.append(metrics_of(played_run(folder, "toy-maze", 80, STEPS, *overrides)))
    return rows[0], rows[1]


def test_an_agent_is_trained_on_as_the_environment_is(runs) -> None:
    ours, theirs = runs
    assert_engine_and_trainer_agree(ours, STEPS)
    assert_same(ours, theirs)


def test_an_agents_calls_are_metrics(runs) -> None:
    ours, _ = runs
    for row in ours[1:]:
        assert row["agent/calls"] == pytest.approx(row["rollout/turns_mean"])
        assert row["agent/resumed_share"] == 1 and row["agent/branches"] == 0
        assert row["agent/reencoded_images"] == row["agent/foreign_assistant_tokens"] == 0
        assert row["env/success"] == pytest.approx(row["reward/mean"])
    assert ours[-1]["val/agent/calls"] >= 1


@pytest.mark.parametrize("overrides", [AGENT, ("rollout.env_processes=1",)], ids=["agent", "env"])
def test_users_code_in_processes_trains_on_ray(tmp_path, overrides) -> None:
    """Not compared digit by digit: which requests share a batch depends on when they arrive."""
    folder = played_run(tmp_path, "toy-maze", 80, STEPS, *overrides, "cluster.backend=ray")
    rows = metrics_of(folder)
    assert_engine_and_trainer_agree(rows, STEPS)
    for row in rows[1:]:
        assert 0 < row["env/success"] < 1 and row["env/turns"] == row["rollout/turns_mean"]


def test_a_command_trains_on_ray(tmp_path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text((ROOT / "tests/command_agent.py").read_text())
    command = [
        *(sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu"),
        f"runner.output_dir={tmp_path}",
        "runner.max_steps=2",
        "data.rollout_batch_size=4",
        "algorithm.group_size=4",
        "data.val_samples=8",
        "runner.save_interval=-1",
        f"rollout.agent.command=[{sys.executable},-S,{agent}]",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"AGENT_KINDS": "good,good,good,crash"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics_of(tmp_path / "toy-grpo-cpu")
    for row in rows[1:]:
        assert row["agent/calls"] == 2 and row["rollout/errors"] == row["rollout/env_errors"] > 0
        assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5
