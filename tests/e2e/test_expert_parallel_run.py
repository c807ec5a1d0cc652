"""A mixture whose experts two ranks share out learns as one whose ranks have all of them: whole runs with routing replay."""

import subprocess
import sys
from pathlib import Path

import pytest
from whole_run import comparable, trajectories_of

from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

pytestmark = pytest.mark.e2e

RECIPE, STEPS = "toy-grpo-cpu-moe", 10
#: Supervised steps after which a tenth to a third of the answers are right, and most tokens nearly certain. After 60, one of 6,000
#: tokens drawn lay so near the edge between two that rounding chose it.
SUPERVISED_STEPS = 120


def train(folder: Path, size: int) -> Path:
    """Train ten steps on two ranks with this `expert_parallel_size`; the run's folder."""
    model = toy_checkpoint_path("toy-qwen3_vl_moe", steps=SUPERVISED_STEPS, progress=False)
    command = [
        *(sys.executable, "-m", "rlinf_vl", "train", RECIPE, f"runner.output_dir={folder}"),
        f"rollout.model.model_path={model}",
        f"runner.max_steps={STEPS}",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "runner.trajectories.groups=-1",
        "data.rollout_batch_size=4",
        "actor.routing_replay=replay",
        f"actor.fsdp_config.expert_parallel_size={size}",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / RECIPE


def test_it_learns_as_without(tmp_path):
    plain, shared = (train(tmp_path / str(size), size) for size in (1, 2))
    answers, shared_answers = (trajectories_of(run)["response"] for run in (plain, shared))
    # A token on the edge between two would be another by rounding: then the runs may part, and no metric says why.
    assert answers.compare(shared_answers).empty, "the runs sampled other tokens"
    rows, shared_rows = comparable(plain), comparable(shared)
    assert list(rows) == list(shared_rows) == list(range(1, STEPS + 1))
    for step, row in rows.items():
        assert shared_rows[step] == pytest.approx(row, rel=1e-5, abs=1e-5), step
        assert row["actor/routing_disagreement"] == 0, "the engine's experts arrived"
    # A step whose answers are all wrong has no gradient: which step that is depends on the processor.
    for figure, least in (("reward/mean", 0), ("actor/grad_norm", 0.1)):
        assert sum(row[figure] > least for row in rows.values()) > STEPS / 2, figure
    # The two sum gradients in another order: what is the same to the last digit has shared out nothing.
    assert any(
        row["actor/grad_norm"] != shared_rows[n]["actor/grad_norm"] for n, row in rows.items()
    )
