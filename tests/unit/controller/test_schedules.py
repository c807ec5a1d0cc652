"""Generation ahead of training: what is asked for when, what a step trains on, what is left to the next process."""

import random
import signal
from dataclasses import replace
from queue import SimpleQueue

import pytest
from unit.controller.fakes import FakeLearner, FakePool, FakeRun

from rlinf_vl.config.schema import runner as schema
from rlinf_vl.controller.loop import RunState
from rlinf_vl.controller.scheduler import RolloutScheduler
from rlinf_vl.controller.schedules import SCHEDULES
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.rollout.submission import GroupArrived, GroupsResent, Submission, SubmissionEnded
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
    run = FakeRun(
        tmp_path, *PLAIN, f"runner.schedule={schedule}", f"runner.max_staleness={staleness}"
    )
    run.train()
    assert [len(groups) for groups in run.pool.asked] == asked
    assert sum(run.learner.trained, []) == sum(run.pool.asked, []), "all are trained, in order"
    assert [line["groups"] for line in run.rows("ledger")] == run.learner.trained
    assert not run.pool.alive and run.pool.versions == [1, 2, 3, 4, 5, 6]


def test_a_further_schedule_is_one_class(tmp_path, monkeypatch):
    """Half a step's groups are generated while the step before trains, the others afterwards."""

    class HalfAhead(RolloutScheduler):
        def n_requests_before(self, step):
            return self.batch_size - len(self.buffer.groups)

        def n_requests_after(self, step):
            return min(self.capacity(step, selected=1), self.batch_size // 2)

    monkeypatch.setitem(SCHEDULES, "half_ahead", HalfAhead)
    monkeypatch.setattr(schema, "SCHEDULES_AHEAD", ("half_ahead",))
    run = FakeRun(tmp_path, *PLAIN, "runner.schedule=half_ahead", "runner.max_steps=3")
    run.train()
    assert [len(groups) for groups in run.pool.asked] == [4, 2, 2, 2, 2]
    assert sum(run.learner.trained, []) == sum(run.pool.asked, [])
    assert [row["schedule/staleness_max"] for row in run.rows()] == [0, 1, 1]
    assert not run.pool.alive and run.pool.versions == [1, 2, 3]


class Slow(FakePool):
    """Groups arrive in an order of their own, some of them only after several weight syncs; a few tie."""

    def __init__(self, seed: int, late: float) -> None:
        super().__init__()
        self.random, self.late = random.Random(seed), late
        self.waiting: list[
            tuple[int, int, Submission, tuple]
        ] = []  # first sync after which it may arrive, number, …

    def submit(self, tasks, events=None):
        done = super().submit(tasks, SimpleQueue())
        submission = Submission(tasks, self.arrive, lambda closed: self.close(closed), events)
        self.alive -= {task.group_id for task in tasks}  # until they have arrived
        for _ in tasks:
            wait = self.random.randint(1, 3) if self.random.random() < self.late else 0
            self.waiting.append(
                (
                    len(self.versions) + wait,
                    self.random.randrange(99),
                    submission,
                    done.events.get(),
                )
            )
        return submission

    def close(self, closed):
        closed.ended = closed.ended or 0.0
        self.waiting = [entry for entry in self.waiting if entry[2] is not closed]

    def arrive(self):
        """One group; a late one before its time only if nothing else can."""
        if self.waiting:
            entry = min(self.waiting, key=lambda e: (max(e[0], len(self.versions)), e[1]))
            self.waiting.remove(entry)
            _, _, submission, (summary, group) = entry
            newest = self.versions[-1] if self.versions else 0
            sampled = dict.fromkeys(range(summary.min_version, newest + 1), 1)
            changed = replace(summary, max_version=newest, version_tokens=sampled)
            submission.events.put(GroupArrived(changed, group))
            submission.arrived.add(summary.id)
            self.alive.add(summary.id)


@pytest.mark.parametrize("stale_groups", ["wait", "drop"])
@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_nothing_is_trained_staler_than_the_bound_however_late_groups_come(
    tmp_path, schedule, staleness, stale_groups
):
    for seed in range(3):
        keys = (
            f"runner.schedule={schedule}",
            f"runner.max_staleness={staleness}",
            f"runner.stale_groups={stale_groups}",
        )
        pool = Slow(seed, late=0.3)
        run = FakeRun(
            tmp_path / str(seed),
            *PLAIN,
            *keys,
            "runner.max_steps=9",
            "runner.save_interval=-1",
            pool=pool,
        )
        run.train()
        rows = run.rows()
        assert [row["step"] for row in rows] == list(range(1, 10))
        assert max(row["schedule/staleness_max"] for row in rows) <= staleness
        for row in rows:
            assert sum(
                row[f"schedule/groups_{k}_behind"] for k in range(staleness + 1)
            ) == pytest.approx(1)
            assert sum(
                row[f"schedule/tokens_{k}_behind"] for k in range(staleness + 1)
            ) == pytest.approx(1)
        lines = run.rows("ledger")
        trained = [group for line in lines for group in line["groups"]]
        stale = [group for line in lines for group in line.get("stale_groups", ())]
        assert len(trained) == 36 == len(set(trained)) and not set(trained) & set(stale)
        assert sum(row["schedule/dropped"] for row in rows) == len(stale)
        assert not stale or stale_groups == "drop"
        assert not pool.alive, "a group was not released"


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
            RunState.read(tmp_path / f"checkpoints/global_step_{run.checkpoints()[-1]}")
            if run.checkpoints()
            else None
        )
        run = FakeRun(tmp_path, *overrides)
        run.train()
        if state:
            assert (
                run.pool.asked[0] == [f"train-{step}-{number}" for step, number, _, _ in state.open]
                or not state.open
            )
    whole = FakeRun(tmp_path / "whole", *overrides)
    whole.train()
    lines, undisturbed = run.rows("ledger"), whole.rows("ledger")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    rows = [row for line in lines for row in line["rows"]]
    assert rows == [row for line in undisturbed for row in line["rows"]]
    groups = [group for line in lines for group in line["groups"]]
    assert len(set(groups)) == len(groups) == 24


@pytest.mark.parametrize(
    ("schedule", "staleness"), [("async", 1), ("async", 0), ("one_step_off", 1), ("sync", 0)]
)
def test_a_run_resumed_with_less_room_trains_on_every_group_that_was_open(
    tmp_path, schedule, staleness
):
    """12 groups are open when the run stops: more than a step, or the smaller bound, has room for."""
    ahead = *PLAIN, "runner.schedule=async", "runner.max_staleness=3", "runner.save_interval=1"

    def strike(calls):
        if calls == 2:  # the second step's: 16 groups were asked for, 4 of them trained
            run.stop.number = signal.SIGTERM

    run = FakeRun(tmp_path, *ahead, pool=FakePool(strike))
    with pytest.raises(Interrupted):
        run.train()
    state = RunState.read(tmp_path / f"checkpoints/global_step_{run.checkpoints()[-1]}")
    assert len(state.open) >= 12
    # A bound of 0 is what sync is; the schema asks for 1 at least.
    bound = f"runner.max_staleness={max(1, staleness)}"
    run = FakeRun(tmp_path, *PLAIN, f"runner.schedule={schedule}", bound, "runner.save_interval=1")
    if staleness == 0 and schedule == "async":
        run.config.runner.max_staleness = 0
    run.train()
    lines = run.rows("ledger")
    groups = [group for line in lines for group in line["groups"]]
    assert {f"train-{step}-{number}" for step, number, _, _ in state.open} <= set(groups)
    assert len(groups) == len(set(groups)) == 24
    assert not any(line.get("stale_groups") or line.get("dropped_groups") for line in lines)
    whole = FakeRun(tmp_path / "whole", *PLAIN)
    whole.train()
    trained, undisturbed = (
        [row for line in one.rows("ledger") for row in line["rows"]] for one in (run, whole)
    )
    assert sorted(trained) == sorted(undisturbed), "no row of the data is skipped"


class FirstGroupTwice(FakePool):
    """A worker dies when its first group has arrived, which comes again before the others; all groups of a step tie."""

    def submit(self, tasks, events=None):
        self.changes |= {f"train-2-{k}": {"rewards": [0.5] * 4} for k in range(4)}
        submitted = super().submit(tasks)
        arrivals = [submitted.events.get() for _ in tasks]
        lost = GroupsResent(frozenset([tasks[0].group_id]))
        submission = Submission(tasks, lambda: None, lambda closed: None, events)
        for event in (arrivals[0], lost, *arrivals, SubmissionEnded()):
            submission.events.put(event)
        return submission


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_group_that_comes_again_before_ties_are_sorted_out_is_sorted_out_once(tmp_path, schedule):
    dynamic = "algorithm.dynamic_sampling.enable=true", "algorithm.dynamic_sampling.max_rounds=2"
    keys = (
        f"runner.schedule={schedule}",
        "runner.max_staleness=2",
        "runner.save_interval=-1",
        *dynamic,
    )
    run = FakeRun(tmp_path, *PLAIN, *keys, pool=FirstGroupTwice())
    run.train()
    lines = run.rows("ledger")
    groups = [
        group
        for line in lines
        for name in ("groups", "dropped_groups")
        for group in line.get(name, ())
    ]
    assert len(groups) == len(set(groups)) and all(len(line["groups"]) == 4 for line in lines)


@pytest.mark.parametrize("normalization, n_dropped", [("sum", 4), ("per_reward", 0)])
def test_equal_sums_of_different_rewards_tie_only_where_sums_are_compared(
    tmp_path, normalization, n_dropped
):
    pool = FakePool()
    values = {"rewards": [0.5] * 4, "scores": [(0.5, 0.0), (0.0, 0.5)] * 2}
    pool.changes = {f"train-1-{k}": dict(values) for k in range(4)}
    functions = "reward.functions=[{function: math}, {function: format}]"
    keys = (
        f"algorithm.reward_normalization={normalization}",
        "algorithm.dynamic_sampling.enable=true",
        "runner.save_interval=-1",
        functions,
    )
    run = FakeRun(tmp_path, *PLAIN, *keys, pool=pool)
    run.train()
    assert len(run.rows("ledger")[0].get("dropped_groups", ())) == n_dropped


def work_of_a_step(tmp_path, groups, monkeypatch):
    """Return how often a run of six steps looks at a group's due step, with so many groups a step."""
    looks = 0
    due_of = RolloutScheduler._due_of

    def counted(self, version):
        nonlocal looks
        looks += 1
        return due_of(self, version)

    monkeypatch.setattr(RolloutScheduler, "_due_of", counted)
    keys = (
        "runner.schedule=async",
        "runner.max_staleness=2",
        "runner.max_steps=6",
        "runner.save_interval=-1",
    )
    run = FakeRun(
        tmp_path / str(groups), *PLAIN, *keys, "data.rollout_batch_size=4", pool=NewestFirst()
    )
    run.config.data.rollout_batch_size = groups
    run.data = replace(
        run.data,
        sampler=EpochSampler(range(8 * groups), groups, shuffle=True, seed=1),
        total_steps=6,
    )
    run.train()
    monkeypatch.undo()
    assert len(run.learner.trained) == 6 and all(
        len(trained) == groups for trained in run.learner.trained
    )
    return looks


class NewestFirst(Slow):
    """Groups arrive one by one, those asked for last before all others. So a step has more finished groups than it takes
    and waits all the same, for old ones that it must not leave to the next."""

    def __init__(self):
        super().__init__(seed=0, late=0.0)

    def arrive(self):
        if self.waiting:
            _, _, submission, (summary, group) = self.waiting.pop()
            submission.events.put(
                GroupArrived(replace(summary, version_tokens={summary.min_version: 1}), group)
            )
            submission.arrived.add(summary.id)
            self.alive.add(summary.id)


def test_the_work_of_choosing_groups_grows_with_their_number_not_its_square(tmp_path, monkeypatch):
    few, many = (work_of_a_step(tmp_path, groups, monkeypatch) for groups in (32, 256))
    assert many < 12 * few, (few, many)  # 8 times the groups; squared it would be 64 times the work


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_a_validation_ends_before_engines_get_other_weights_and_its_step_has_its_metrics(
    tmp_path, schedule
):
    order: list[tuple] = []

    class Run(FakeRun):
        def __call__(self, version):
            order.append(("sync", version))
            return super().__call__(version)

    run = Run(tmp_path, APART, f"runner.schedule={schedule}", "runner.save_interval=1")
    submit, update = run.pool.submit, run.learner.update

    class Watched(Submission):
        def results(self):
            order.append(("validated", self.tasks[0].group_id))
            return super().results()

    def watched(tasks, events=None):
        submission = submit(tasks, events)
        if tasks[0].split == "val":
            order.append(("validate", tasks[0].group_id))
            submission.__class__ = Watched
        return submission

    run.pool.submit = watched
    run.learner.update = lambda step, *rest: order.append(("train", step)) or update(step, *rest)
    run.train()
    steps = [row["step"] for row in run.rows()]
    assert steps == list(range(7)) and [
        row["step"] for row in run.rows() if "val/accuracy" in row
    ] == [0, 2, 4, 6]
    for step in (0, 2, 4):
        begun, ended = (
            order.index(("validate", f"val-{step}-0")),
            order.index(("validated", f"val-{step}-0")),
        )
        assert begun < order.index(("train", step + 1)) < ended < order.index(("sync", step + 1))
        assert not step or begun > order.index(("sync", step))
    assert not run.pool.alive


def test_a_run_that_dies_while_it_validates_validates_again(tmp_path):
    """The step's line waits for the validation, and the checkpoint says so."""
    keys = APART, "runner.schedule=async", "runner.save_interval=1"

    def strike(step):
        if step == 3:
            raise MemoryError

    run = FakeRun(tmp_path, *keys, learner=FakeLearner(strike))
    with pytest.raises(MemoryError):
        run.train()
    assert [row["step"] for row in run.rows()] == [0, 1] and run.checkpoints()[-1] == 2
    run.pool.release()
    again = FakeRun(tmp_path, *keys)
    again.train()
    assert [row["step"] for row in again.rows()] == list(range(7))
    assert [row["step"] for row in again.rows() if "val/accuracy" in row] == [0, 2, 4, 6]
    assert set(RunState.read(tmp_path / "checkpoints/global_step_6").accuracies) == {0, 2, 4, 6}
