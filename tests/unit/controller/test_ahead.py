"""Generation ahead of training: what is asked for when, what a step trains on, what is left to the next process."""

import signal

import pytest
from unit.controller.fakes import FakePool, FakeRun

from rlinf_vl.controller.loop import RunState
from rlinf_vl.runtime.stop_request import Interrupted

APART = "cluster.component_placement={actor: 0, rollout: 1}"
PLAIN = [APART, "runner.val_check_interval=-1", "runner.mismatch_check_interval=-1"]


@pytest.mark.parametrize(
    ("schedule", "staleness", "asked"),
    [
        ("sync", 1, [4, 4, 4, 4, 4, 4]),
        ("one_step_off", 1, [4, 4, 4, 4, 4, 4]),
        ("one_step_off", 3, [4, 4, 4, 4, 4, 4]),  # what is finished is not asked for again
        ("async", 1, [8, 4, 4, 4, 4]),
        ("async", 3, [16, 4, 4]),
    ],
)
def test_a_schedule_asks_for_groups_as_far_ahead_as_it_may_and_for_none_beyond_the_end(
    tmp_path, schedule, staleness, asked
):
    run = FakeRun(tmp_path, *PLAIN, f"runner.schedule={schedule}", f"runner.max_staleness={staleness}")
    run.train()
    assert [len(groups) for groups in run.pool.asked] == asked
    assert sum(run.learner.trained, []) == sum(run.pool.asked, []), "all are trained, in order"
    assert [line["groups"] for line in run.rows("ledger")] == run.learner.trained
    assert not run.pool.alive and run.pool.versions == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
@pytest.mark.parametrize("call", range(6))
def test_a_run_that_is_told_to_stop_asks_again_for_what_was_under_way(tmp_path, schedule, call):
    """Each row of the data is trained once, as by a run never stopped."""

    def strike(calls):
        if calls == call:
            run.stop.number = signal.SIGTERM
            run.stop.check()

    overrides = *PLAIN, f"runner.schedule={schedule}", "runner.max_staleness=2"
    run = FakeRun(tmp_path, *overrides, pool=FakePool(strike))
    try:
        run.train()
    except Interrupted:
        state = (
            RunState.read(tmp_path / f"checkpoints/global_step_{run.checkpoints()[-1]}") if run.checkpoints() else None
        )
        run = FakeRun(tmp_path, *overrides)
        run.train()
        if state:
            assert (
                run.pool.asked[0] == [f"train-{step}-{number}" for step, number, _, _ in state.open] or not state.open
            )
    whole = FakeRun(tmp_path / "whole", *overrides)
    whole.train()
    lines, undisturbed = run.rows("ledger"), whole.rows("ledger")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    rows = [row for line in lines for row in line["rows"]]
    assert rows == [row for line in undisturbed for row in line["rows"]]
    groups = [group for line in lines for group in line["groups"]]
    assert len(set(groups)) == len(groups) == 24
