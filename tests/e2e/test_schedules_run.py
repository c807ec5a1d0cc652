"""Whole runs in which generation goes ahead of training, on real processes: what they train on, when, and how they go on."""

import os
import signal
from pathlib import Path

import pytest
from whole_run import Run, comparable, rows_of

from rlinf_vl.observe.spans import read_spans

pytestmark = pytest.mark.e2e

STEPS = 6
APART = (
    "cluster.component_placement={actor: 0, rollout: 1}",
    f"runner.max_steps={STEPS}",
    "runner.val_check_interval=3",
    "data.val_samples=16",
    "data.rollout_batch_size=6",
    "algorithm.group_size=4",
    "runner.mismatch_check_interval=2",
)

#: Three turns; in every eighth episode the environment takes a second for each.
SLOW = """
import random, time
from rlinf_vl.envs import StepResult

class Slow:
    def __init__(self, *, seed):
        self.slow, self.turns = seed % 8 == 0, 3
        self.reward = float(random.Random(seed).random() < 0.5)

    def start(self, problem):
        return list(problem.messages)

    def step(self, response):
        if self.slow:
            time.sleep(1.0)
        self.turns -= 1
        said = [{"role": "user", "content": "And now?"}]
        return StepResult(said, self.reward if self.turns == 0 else 0.0, self.turns == 0)

    def close(self):
        pass
"""


def check_ledger(folder: Path) -> list[str]:
    """Every step once, every group and every row once (one epoch is enough for the run); the groups."""
    lines = rows_of(folder / "ledger.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    groups = [group for line in lines for group in line["groups"]]
    rows = [row for line in lines for row in line["rows"]]
    assert len(groups) == len(set(groups)) == len(rows) == len(set(rows)) == 6 * STEPS
    return groups


def staleness(folder: Path) -> dict[int, int]:
    """By step, how many versions behind the oldest token is that it trained on."""
    return {
        row["step"]: int(row["step"] - 1 - row["rollout/weight_version_min"])
        for row in rows_of(folder / "metrics.jsonl")
        if row["step"]
    }


def test_slow_environments_hold_neither_the_engine_nor_the_step_and_open_groups_are_asked_for_again(
    tmp_path,
):
    (tmp_path / "slow.py").write_text(SLOW)
    overrides = (
        *APART,
        "runner.schedule=async",
        "runner.max_staleness=3",
        f"rollout.env_class={tmp_path}/slow.py:Slow",
        "algorithm.sampling_params.max_new_tokens=8",
        "algorithm.val_sampling_params.max_new_tokens=8",
    )
    run = Run(tmp_path / "run", *overrides)
    run.until_step(3)
    os.killpg(run.process.pid, signal.SIGTERM)
    run.finish(expect=128 + signal.SIGTERM)
    stopped = rows_of(run.folder / "metrics.jsonl")[-1]["step"]
    assert 3 <= stopped < STEPS
    Run(tmp_path / "run", *overrides, "runner.resume_dir=auto").finish()

    groups = check_ledger(run.folder)
    before = [group for group in groups[6 * stopped :] if int(group.split("-")[1]) <= stopped]
    assert before, "groups that were asked for before the stop are trained after it"
    behind = staleness(run.folder)
    assert 0 < max(behind.values()) <= 3
    rows = [row for row in rows_of(run.folder / "metrics.jsonl") if row["step"]]
    for row in rows:
        assert sum(row[f"schedule/tokens_{n}_behind"] for n in range(4)) == pytest.approx(1)
        assert row["schedule/dropped"] == 0  # stale_groups is wait

    spans = [span for span in read_spans(run.folder) if span["process"] == "rollout 0"]
    slept = [
        (span["start"], span["end"])
        for span in spans
        if span["name"] == "environment" and span["end"] - span["start"] > 0.9
    ]
    decoded = [span["end"] for span in spans if span["name"] in ("decode", "prefill")]
    busy = [any(start < end < stop for end in decoded) for start, stop in slept]
    assert slept and sum(busy) > len(busy) / 2, (
        "the engine works for others while an environment takes its time"
    )


@pytest.fixture(scope="module")
def one_step_off(tmp_path_factory) -> Run:
    run = Run(tmp_path_factory.mktemp("first"), *APART, "runner.schedule=one_step_off")
    run.finish()
    return run


def test_one_step_off_trains_on_the_weights_of_the_step_before(one_step_off):
    """With its default bound every group of a step is from the weights of the step before that."""
    check_ledger(one_step_off.folder)
    expected = {step: min(step - 1, 1) for step in range(1, STEPS + 1)}
    assert staleness(one_step_off.folder) == expected


def test_one_step_off_is_the_same_again(one_step_off, tmp_path):
    again = Run(tmp_path, *APART, "runner.schedule=one_step_off")
    again.finish()
    check_ledger(again.folder)
    assert staleness(again.folder) == staleness(one_step_off.folder)
    metrics = []
    for run in (one_step_off, again):
        steps = {}
        for step, row in comparable(run.folder).items():
            steps[step] = {k: v for k, v in row.items() if not k.startswith("schedule/")}
        metrics.append(steps)
    assert metrics[0] == metrics[1]
