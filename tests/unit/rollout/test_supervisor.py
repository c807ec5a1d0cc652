"""The supervisor with workers that are objects in this process: what they answer, and when they die, is the test's to say."""

import asyncio
import itertools
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from rlinf_vl.rollout import submission
from rlinf_vl.rollout.pool import elasticity, updates, worker_placements
from rlinf_vl.rollout.pool import supervisor as module
from rlinf_vl.rollout.pool.slot import Place, SlotState
from rlinf_vl.rollout.pool.supervisor import Supervisor, WorkerDied, WorkersLost
from rlinf_vl.rollout.pool.worker_placements import WorkerPlacements
from rlinf_vl.rollout.submission import Task
from rlinf_vl.weights.sender import Snapshot


class Fleet:
    """A supervisor of workers that are objects. `script`: worker0, worker1, … as they are made → what goes wrong with each."""

    def __init__(self, n=2, *, max_running=None, start=True, weights=None, poison=(), **script):
        self.poison = poison
        self.workers, self.reports, self.script = [], [], script
        self.places_lost, self.places_awaited, self.coming = set(), set(), []
        self.supervisor = Supervisor(
            self.make,
            n,
            max_running=max_running,
            report=lambda message, kind="worker_replaced": self.reports.append(message),
            places=self.places,
            newcomers=lambda: [self.coming.pop() for _ in list(self.coming)],
        )
        if weights is not None:
            self.sync(*weights)
        if start:
            self.supervisor.start()

    def places(self, numbers):
        return dict.fromkeys(self.places_lost, Place.GONE) | dict.fromkeys(
            self.places_awaited, Place.AWAITED
        )

    def begin(self, version, buckets=(), *, joinable=True, update=None, snapshot=None):
        """Begin a sync, which a `settle` ends."""
        return self.supervisor.in_loop(
            self.supervisor.updates.offer,
            update,
            lambda worker: worker.call("take_weights", version),
            version,
            snapshot or (lambda: Snapshot(version, list(buckets))),
            joinable,
        )

    def settle(self, update):
        return self.supervisor.run(self.supervisor.updates.settle(update)).result()

    def soon(self, method, group_ids):
        """Call a method of the dispatcher."""
        self.supervisor.soon(getattr(self.supervisor.groups, method), group_ids)

    def sync(self, version, buckets=(), **options):
        return self.settle(self.begin(version, buckets, **options))

    def states(self):
        return [slot.state for slot in self.supervisor.slots]

    def make(self, number):
        self.workers.append(
            FakeWorker(
                len(self.workers),
                poison=self.poison,
                **self.script.get(f"worker{len(self.workers)}", {}),
            )
        )
        return self.workers[-1]

    def submit(self, tasks, check=lambda: None):
        return self.supervisor.submit(tasks, tasks, check)

    def ping(self, number):
        return self.supervisor.call(number, "in the test", "ping").result()


class FakeWorker:
    """Answers at once, or (`manual`) when the test says so; dies, or hangs, after so many groups."""

    def __init__(
        self,
        made,
        *,
        ready=True,
        load=None,
        take=None,
        dies_after=None,
        hangs_after=None,
        manual=False,
        poison=(),
    ):
        self.poison = poison  # groups that kill it
        self.made, self.ready, self.load, self.take = made, ready, load, take
        self.cancelled, self.released, self.watched = [], [], 0
        self.dies_after, self.hangs_after = dies_after, hangs_after
        self.allowed = 0 if manual else 10**9  # groups that it may still answer
        self.dead, self.hangs, self.error, self.weights, self.batches = False, False, None, None, []

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0.001)
            if self.dead:
                raise WorkerDied("killed")

    async def call(self, method, *args):
        await self.until(lambda: True)
        if self.dead:
            raise WorkerDied("killed")
        answers = {
            "ready": lambda: self.ready,
            "load_snapshot": lambda: self.load,
            "take_weights": lambda: self.take,
        }
        result = answers.get(method, lambda: (self.made, method, *args))()
        while result == "later":  # the test says when
            await asyncio.sleep(0.001)
            if self.dead:
                raise WorkerDied("killed")
            result = answers[method]()
        if method == "load_snapshot":
            (self.weights,) = args
        if result == "never":
            await self.until(lambda: False)
        if isinstance(result, Exception):
            raise result
        return result

    async def generate(self, tasks):
        self.batches.append([task.group_id for task in tasks])
        for task in tasks:
            if task.group_id in self.cancelled:
                continue
            self.dead |= self.dies_after == 0 or (task.group_id in self.poison and not task.fault)
            self.hangs |= self.hangs_after == 0
            await self.until(partial(self.may_go_on, task.group_id))
            if self.error is not None:
                raise self.error
            if task.group_id in self.cancelled:
                continue
            self.allowed -= 1
            self.dies_after = None if self.dies_after is None else self.dies_after - 1
            self.hangs_after = None if self.hangs_after is None else self.hangs_after - 1
            yield SimpleNamespace(id=task.group_id), task.fault or f"{task.group_id} of {self.made}"

    def may_go_on(self, group_id):
        well = self.allowed and not self.hangs and not self.dead
        return well or self.error or (group_id in self.cancelled and not self.dead)

    def answer(self, n=10**9):
        self.allowed += n

    def cancel(self, group_ids):
        self.cancelled += group_ids

    def release(self, group_ids):
        self.released.append(group_ids)

    def watch(self):
        self.watched += 1

    def failure(self):
        if isinstance(self.hangs, Exception):
            raise self.hangs
        return "no heartbeat for 8 s" if self.hangs else None

    def kill(self):
        self.dead = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "WATCH_S", 0.005)
    monkeypatch.setattr(elasticity, "LOOK_S", 0.005)
    monkeypatch.setattr(submission, "CHECK_S", 0.01)


def tasks(n, prefix="g", samples=2):
    return [Task(f"{prefix}{i}", "train", i, tuple(range(samples))) for i in range(n)]


def answered(results):
    return [(summary.id, group) for summary, group in results]


@pytest.mark.parametrize("max_running", [None, 2, 64])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_every_task_is_answered_once_and_in_order(n, max_running):
    fleet = Fleet(max_running=max_running)
    results = answered(fleet.submit(tasks(n)).results())
    assert [name for name, _ in results] == [f"g{i}" for i in range(n)]
    assert not fleet.reports


def test_without_a_bound_each_worker_answers_its_share_as_one_batch_one_submission_after_the_other():
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True})
    first, second = fleet.submit(tasks(5, "a")), fleet.submit(tasks(3, "b"))
    one, two = fleet.workers
    until(lambda: one.batches and two.batches)
    assert (one.batches, two.batches) == ([["a0", "a1", "a2"]], [["a3", "a4"]])
    two.answer()
    until(lambda: len(two.batches) == 2)
    assert (len(one.batches), two.batches[1]) == (1, ["b2"]), (
        "its next share does not wait for the other worker"
    )
    one.answer()
    assert [name for name, _ in answered(second.results())] == ["b0", "b1", "b2"]
    assert [name for name, _ in answered(first.results())] == ["a0", "a1", "a2", "a3", "a4"]


def test_with_a_bound_a_worker_gets_one_more_for_each_that_it_finishes():
    fleet = Fleet(max_running=2, worker0={"manual": True}, worker1={"manual": True})
    submission = fleet.submit(tasks(8))
    one, two = fleet.workers
    until(lambda: one.batches and two.batches)
    assert (one.batches, two.batches) == ([["g0", "g1"]], [["g4", "g5"]]), (
        "four samples each, twice max_running"
    )
    one.answer(1)
    until(lambda: len(one.batches) == 2)
    assert one.batches[1] == ["g2"] and len(two.batches) == 1
    one.answer()
    # It has done its share, and helps the other.
    until(lambda: any("g7" in batch for batch in one.batches))
    two.answer()
    assert len(submission.results()) == 8


def test_a_task_above_the_bound_is_sent_alone():
    fleet = Fleet(n=1, max_running=2)
    assert len(fleet.submit(tasks(3, samples=64)).results()) == 3
    assert fleet.workers[0].batches == [["g0"], ["g1"], ["g2"]]


@pytest.mark.parametrize("max_running", [None, 2])
@pytest.mark.parametrize("fault", ["dies_after", "hangs_after"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_a_lost_worker_had_is_sent_again_also_what_had_arrived(max_running, fault, after):
    fleet = Fleet(max_running=max_running, worker0={fault: after})
    results = answered(fleet.submit(tasks(6)).results())
    assert [name for name, _ in results] == [f"g{i}" for i in range(6)]
    assert not any(group.endswith("of 0") for _, group in results), (
        "groups of the dead worker are gone with it"
    )
    until(lambda: len(fleet.workers) == 3)
    (report,) = fleet.reports
    reason = {"dies_after": "killed", "hangs_after": "no heartbeat for 8 s"}[fault]
    assert report.startswith("a rollout worker is replaced and its ") and report.endswith(
        f"sent again: {reason}"
    )
    assert [slot.restarts for slot in fleet.supervisor.slots] == [1, 0]
    assert fleet.workers[0].dead
    if max_running is None:
        assert fleet.workers[2].batches == fleet.workers[0].batches, (
            "the same tasks make the same batch"
        )


def test_a_group_that_was_lost_comes_again():
    fleet = Fleet(n=1, worker0={"dies_after": 2})
    assert answered(fleet.submit(tasks(3))) == [
        ("g0", "g0 of 0"),
        ("g1", "g1 of 0"),
        ("g0", "g0 of 1"),
        ("g1", "g1 of 1"),
        ("g2", "g2 of 1"),
    ]


@pytest.mark.parametrize("max_running", [None, 2, 64])
@pytest.mark.parametrize("n", [1, 2])
def test_a_row_that_kills_its_workers_is_quarantined_and_no_other(max_running, n):
    fleet = Fleet(n, max_running=max_running, poison=["g3", "g5"])
    results = dict(answered(fleet.submit(tasks(8)).results()))
    assert list(results) == [f"g{i}" for i in range(8)]
    reason = "3 workers died while they answered it, the last one with nothing else to do"
    assert [name for name, group in results.items() if group == reason] == ["g3", "g5"]
    last = [worker.batches[-1] for worker in fleet.workers if worker.dead]
    assert ["g3"] in last and ["g5"] in last, "each was convicted alone"
    # The last death was reported, too.
    until(lambda: all(slot.live for slot in fleet.supervisor.slots))
    died = len(fleet.reports)
    assert 4 <= died <= 6
    again = dict(answered(fleet.submit(tasks(8)).results()))
    assert [name for name, group in again.items() if group == reason] == ["g3", "g5"]
    assert len(fleet.reports) == died, "a row that is quarantined is not tried again"


@pytest.mark.parametrize("max_running", [None, 2, 64])
def test_two_submissions_in_flight_lose_nothing_when_a_worker_dies(max_running):
    fleet = Fleet(max_running=max_running, worker0={"dies_after": 3}, worker2={"hangs_after": 1})
    train, val = fleet.submit(tasks(9, "t")), fleet.submit(tasks(5, "v", samples=1))
    assert [name for name, _ in answered(val.results())] == [f"v{i}" for i in range(5)]
    assert [name for name, _ in answered(train.results())] == [f"t{i}" for i in range(9)]


def test_replacements_get_the_current_weights_before_any_work():
    fleet = Fleet(worker0={"dies_after": 0}, weights=(7, ["bucket"]))
    fleet.submit(tasks(4)).results()
    assert fleet.workers[2].weights == Snapshot(7, ["bucket"])


def test_replacements_that_fail_are_replaced_and_too_many_end_it_in_words(monkeypatch):
    dying = {"ready": WorkerDied("no start")}
    starts = {"worker1": dying, "worker2": {"load": WorkerDied("no weights")}}
    fleet = Fleet(n=1, worker0={"dies_after": 0}, weights=(1,), **starts)
    assert len(fleet.submit(tasks(2)).results()) == 2
    assert [report.rsplit(": ")[1] for report in fleet.reports] == [
        "killed",
        "no start",
        "no weights",
    ]
    monkeypatch.setattr(module, "MAX_DEATHS", 2)
    fleet = Fleet(n=1, worker0={"dies_after": 0}, worker1=dying, worker2=dying)
    with pytest.raises(WorkersLost, match="3 rollout workers failed of late.*: no start"):
        fleet.submit(tasks(2)).results()
    monkeypatch.undo()
    assert len(fleet.submit(tasks(2)).results()) == 2, "the next submission has another try"


def test_a_replacement_that_does_not_start_or_hangs_with_the_weights_is_replaced(monkeypatch):
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.05)
    starts = {"worker1": {"ready": "never"}, "worker2": {"load": "never"}}
    fleet = Fleet(n=1, weights=(1,), worker0={"dies_after": 0}, **starts)
    submission = fleet.submit(tasks(2))
    until(lambda: len(fleet.workers) == 3)
    fleet.workers[2].hangs = True
    assert len(submission.results()) == 2
    assert [report.split(": ")[1] for report in fleet.reports] == [
        "killed",
        "it did not start within 0.05 s",
        "no heartbeat for 8 s",
    ]


def test_calls_are_made_again_on_the_replacement():
    fleet = Fleet()
    assert [fleet.ping(0), fleet.ping(1)] == [(0, "ping"), (1, "ping")]
    fleet.workers[0].dead = True
    futures = [fleet.supervisor.call(0, "in the test", name, 5) for name in ("ping", "pong")]
    assert [future.result() for future in futures] == [(2, "ping", 5), (2, "pong", 5)]
    assert fleet.reports == ["a rollout worker is replaced in the test: killed"]


def test_a_sync_does_not_wait_for_the_replacement_of_a_worker_that_dies_in_it():
    fleet = Fleet(worker2={"ready": "later"})
    fleet.workers[1].dead = True
    assert fleet.sync(3) == [None, None]
    assert fleet.reports == ["a rollout worker is replaced during a weight sync: killed"]
    assert fleet.states()[0] is SlotState.LIVE and fleet.states()[1] is not SlotState.LIVE
    until(lambda: len(fleet.workers) == 3)
    fleet.workers[2].ready = True
    assert fleet.ping(1) == (2, "ping") and fleet.workers[2].weights == Snapshot(3, [])


def test_a_worker_that_dies_after_its_part_of_an_open_submission_is_replaced_too():
    fleet = Fleet(worker1={"manual": True})
    submission = fleet.submit(tasks(4))
    until(lambda: len(submission.arrived) == 2)
    fleet.workers[0].hangs = True
    until(lambda: fleet.reports)
    fleet.workers[1].answer()
    assert not any(group.endswith("of 0") for _, group in submission.results())


def test_the_error_of_a_task_ends_its_submission():
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True}, max_running=8)
    bad, good = fleet.submit(tasks(2, "bad")), fleet.submit(tasks(2, "good"))
    until(lambda: all(len(worker.batches) == 2 for worker in fleet.workers))
    fleet.workers[0].error = ValueError("odd row")
    with pytest.raises(ValueError, match="odd row"):
        bad.results()
    with pytest.raises(ValueError, match="odd row"):
        good.results()
    fleet.workers[0].error = None
    for worker in fleet.workers:
        worker.answer()
    assert len(fleet.submit(tasks(3)).results()) == 3
    assert not fleet.reports


def test_an_error_in_the_replacing_reaches_whoever_waits():
    fleet = Fleet(worker0={"dies_after": 0})

    def gone():
        raise OSError("the ranks are dead")

    fleet.sync(1, snapshot=gone)
    with pytest.raises(OSError, match="the ranks are dead"):
        fleet.submit(tasks(4)).results()
    fleet.supervisor.in_loop(fleet.supervisor.updates.forget)
    assert len(fleet.submit(tasks(4)).results()) == 4


def test_a_constructors_own_error_is_raised_at_the_start_and_no_chance_later():
    config_error = ValueError("no such model")
    death = WorkerDied("it raised", in_constructor=True)
    death.__cause__ = config_error
    fleet = Fleet(worker1={"ready": death}, start=False)
    with pytest.raises(ValueError, match="no such model"):
        fleet.supervisor.start()
    assert len(fleet.workers) == 2


def test_a_process_that_dies_while_the_run_starts_is_replaced():
    fleet = Fleet(worker1={"ready": WorkerDied("killed")})
    assert fleet.ping(1) == (2, "ping")
    assert fleet.reports == ["a rollout worker is replaced while it starts: killed"]


def test_waiting_asks_whether_to_stop_and_what_is_left_is_abandoned():
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True})
    asked = itertools.count()

    def check():
        if next(asked) == 3:
            raise InterruptedError("stop")

    with pytest.raises(InterruptedError):
        fleet.submit(tasks(4), check).results()
    until(lambda: not any(slot.sent_tasks or slot.streams for slot in fleet.supervisor.slots))
    for worker in fleet.workers:
        worker.answer()
    assert len(fleet.submit(tasks(4)).results()) == 4


def test_all_workers_can_be_replaced_in_the_middle_of_a_submission():
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True})
    submission = fleet.submit(tasks(4))
    until(lambda: all(worker.batches for worker in fleet.workers))
    fleet.workers[1].answer(1)
    fleet.supervisor.replace_all()
    assert {group[-1] for _, group in answered(submission.results())} == {"2", "3"}
    assert fleet.workers[0].dead and fleet.workers[1].dead


@pytest.mark.parametrize("max_running", [None, 2, 64])
@pytest.mark.parametrize("fault", ["dies_after", "hangs_after"])
def test_what_a_worker_had_whose_place_is_lost_goes_to_the_others(max_running, fault):
    fleet = Fleet(n=3, max_running=max_running, worker0={fault: 1})
    fleet.places_lost.add(0)
    results = answered(fleet.submit(tasks(9)).results())
    assert [name for name, _ in results] == [f"g{i}" for i in range(9)]
    assert not any(group.endswith("of 0") for _, group in results)
    until(lambda: [slot.number for slot in fleet.supervisor.slots] == [1, 2])
    until(lambda: fleet.workers[0].dead)
    assert len(fleet.workers) == 3 and fleet.supervisor.replaced == 0
    (report,) = fleet.reports
    assert report.startswith("rollout worker 0 left: ") and "2 others do its work" in report
    assert len(fleet.submit(tasks(4)).results()) == 4


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_place_that_is_lost_while_its_worker_is_replaced(is_reported):
    """The replacement dies with it, or waits for the place for ever."""
    fleet = Fleet(worker0={"dies_after": 0}, worker2={"ready": "never"})
    submission = fleet.submit(tasks(4))
    until(lambda: len(fleet.workers) == 3)
    fleet.places_lost.add(0)
    fleet.workers[2].dead |= is_reported
    assert {group[-1] for _, group in answered(submission.results())} == {"1"}


@pytest.mark.parametrize("max_running", [None, 2])
def test_a_worker_that_joins_gets_the_current_weights_and_then_work(max_running):
    fleet = Fleet(
        max_running=max_running,
        weights=(7, ["bucket"]),
        worker0={"manual": True},
        worker1={"manual": True},
    )
    first = fleet.submit(tasks(12, "a"))
    until(lambda: fleet.workers[0].batches and fleet.workers[1].batches)
    chosen = fleet.supervisor.in_loop(
        fleet.supervisor.updates.open
    )  # of a sync whose members must know each other
    fleet.coming.append(2)
    until(lambda: len(fleet.workers) == 3)
    time.sleep(0.1)
    assert fleet.workers[2].weights is None and len(fleet.supervisor.slots) == 2
    fleet.sync(8, ["newer"], joinable=False, update=chosen)
    until(lambda: len(fleet.supervisor.slots) == 3)
    assert fleet.workers[2].weights == Snapshot(8, ["newer"])
    second = fleet.submit(tasks(12, "b"))
    until(lambda: fleet.workers[2].batches)
    for worker in fleet.workers:
        worker.answer()
    assert len(first.results()) == len(second.results()) == 12
    assert fleet.ping(2) == (2, "ping") and fleet.reports == ["rollout worker 2 joined: 3 now"]


def test_work_waits_when_the_last_worker_leaves_until_another_joins():
    fleet = Fleet(n=1, worker0={"dies_after": 1})
    fleet.places_lost.add(0)
    submission = fleet.submit(tasks(3))
    until(lambda: not fleet.supervisor.slots)
    later = fleet.submit(tasks(2, "later"))
    fleet.coming.append(1)
    assert {group[-1] for _, group in answered(submission.results() + later.results())} == {"1"}


def test_one_that_can_not_join_is_given_up_and_told():
    dying = {"ready": WorkerDied("no start")}
    fleet = Fleet(worker2=dying, worker3=dying, worker4=dying)
    fleet.coming.append(2)
    until(lambda: fleet.reports)
    assert fleet.reports == ["rollout worker 2 did not join: no start"]
    assert len(fleet.workers) == 5 and all(worker.dead for worker in fleet.workers[2:])
    assert len(fleet.submit(tasks(4)).results()) == 4


def test_calls_and_syncs_do_not_wait_for_one_that_leaves():
    fleet = Fleet(weights=(3,))
    fleet.places_lost.add(1)
    fleet.workers[1].dead = True
    assert fleet.sync(4) == [None, None]
    assert fleet.ping(1) is None
    until(lambda: len(fleet.supervisor.slots) == 1)
    assert fleet.ping(0) == (0, "ping")


# --- who is live, and with which weights ------------------------------------------------------------------------------------


def test_a_sync_goes_to_live_workers_only_and_one_that_starts_takes_the_newest_whole():
    """With `weight_sync: delta` a worker that starts would refuse what changes weights that it does not have."""
    fleet = Fleet(weights=(1,), worker1={"dies_after": 0}, worker2={"ready": "later"})
    submission = fleet.submit(tasks(4))
    until(lambda: len(fleet.workers) == 3)
    assert fleet.states() == [SlotState.LIVE, SlotState.STARTING]
    assert [slot.number for slot, _ in fleet.begin(2).receivers] == [0]
    fleet.sync(3, ["newest"])
    fleet.workers[2].ready = True
    assert len(submission.results()) == 4
    assert fleet.workers[2].weights == Snapshot(3, ["newest"])
    assert [slot.number for slot, _ in fleet.begin(4).receivers] == [0, 1]


def test_a_worker_that_is_ready_while_the_next_sync_waits_for_its_weights_takes_part_in_it():
    """A sync begins when its step is trained. Who only ever took what was sent last would come too late again and again."""
    fleet = Fleet(
        weights=(1,),
        worker0={"take": "later"},
        worker1={"dies_after": 0},
        worker2={"load": "later"},
    )
    submission = fleet.submit(tasks(4))
    until(lambda: SlotState.LOADING_WEIGHTS in fleet.states())
    update = fleet.begin(2)
    fleet.workers[2].load = None
    fleet.workers[2].take = "later"
    until(lambda: fleet.states() == [SlotState.LIVE] * 2)
    assert len(submission.results()) == 4
    settled = threading.Thread(target=fleet.settle, args=[update])
    settled.start()
    fleet.workers[0].take = None
    time.sleep(0.05)
    assert settled.is_alive(), "it is live, and waited for"
    fleet.workers[2].take = None
    settled.join(10)
    assert {slot.weights for slot in fleet.supervisor.slots} == {(0, 2)}


def test_a_constructor_that_takes_longer_than_a_heartbeat_survives_it():
    fleet = Fleet(weights=(1,), worker1={"dies_after": 0}, worker2={"ready": "later"})
    submission = fleet.submit(tasks(4))
    until(lambda: len(fleet.workers) == 3)
    fleet.workers[2].hangs = True  # as far as its heartbeat says
    fleet.sync(2)
    called = fleet.supervisor.call(1, "in the test", "ping")
    time.sleep(0.1)
    assert not fleet.workers[2].dead and len(fleet.workers) == 3
    fleet.workers[2].hangs, fleet.workers[2].ready = False, True
    assert called.result() == (2, "ping") and len(submission.results()) == 4


@pytest.mark.parametrize("stage", ["ready", "load"])
def test_a_joiner_that_hangs_delays_no_sync(stage):
    fleet = Fleet(weights=(1,), worker2={stage: "later"})
    fleet.coming.append(2)
    until(lambda: len(fleet.workers) == 3)
    for version in range(2, 22):
        fleet.sync(version)
    (joiner,) = fleet.supervisor.joining
    assert joiner.state in (SlotState.STARTING, SlotState.LOADING_WEIGHTS) and not fleet.reports
    setattr(fleet.workers[2], stage, None)
    until(lambda: len(fleet.supervisor.slots) == 3)
    assert fleet.workers[2].weights == Snapshot(21, [])


@pytest.mark.parametrize("stage", ["ready", "load"])
def test_a_joiner_that_hangs_is_given_up(monkeypatch, stage):
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(updates, "LOAD_TIMEOUT_S", 0.05)
    hanging = {stage: "never"}
    fleet = Fleet(weights=(1,), worker2=hanging, worker3=hanging, worker4=hanging)
    fleet.coming.append(2)
    until(lambda: fleet.reports)
    assert fleet.reports[0].startswith("rollout worker 2 did not join: it did not ")
    assert all(worker.dead for worker in fleet.workers[2:]) and fleet.supervisor.joining == []


def test_a_live_worker_that_does_not_take_weights_is_replaced(monkeypatch):
    monkeypatch.setattr(updates, "LOAD_TIMEOUT_S", 0.1)
    fleet = Fleet(worker1={"take": "never"})
    assert fleet.sync(2) == [None, None]
    assert fleet.ping(1) == (2, "ping") and fleet.workers[2].weights == Snapshot(2, [])


def test_workers_that_start_at_the_same_time_share_one_snapshot():
    fleet = Fleet(
        n=3, worker0={"dies_after": 0}, worker1={"dies_after": 0}, worker2={"dies_after": 0}
    )
    fetched = []

    def snapshot():
        fetched.append(True)
        time.sleep(0.1)
        return Snapshot(1, [])

    fleet.sync(1, snapshot=snapshot)
    assert len(fleet.submit(tasks(6)).results()) == 6
    assert len(fetched) == 1


# --- how often workers may die ----------------------------------------------------------------------------------------------


def test_many_workers_survive_more_deaths_than_few():
    fleet = Fleet(n=40, max_running=2, **{f"worker{i}": {"dies_after": 0} for i in range(24)})
    assert len(fleet.submit(tasks(80)).results()) == 80
    until(lambda: fleet.supervisor.replaced == 24)
    for k in range(4):
        assert len(fleet.submit(tasks(80, f"{k}-")).results()) == 80
    assert not any(slot.deaths for slot in fleet.supervisor.slots), "their groups were of use"


def test_two_workers_that_die_again_and_again_end_the_run():
    fleet = Fleet(n=2, max_running=2, poison=[f"g{i}" for i in range(40)])
    with pytest.raises(WorkersLost, match="9 rollout workers failed of late"):
        fleet.submit(tasks(40)).results()


def test_a_slot_whose_workers_die_again_and_again_is_given_up_where_others_do_its_work():
    fleet = Fleet(n=30, max_running=2)
    make = fleet.supervisor._make
    fleet.supervisor._make = lambda number: make(number) if number else broken(make(number))
    fleet.workers[0].dies_after = 0
    assert len(fleet.submit(tasks(90)).results()) == 90
    until(lambda: len(fleet.supervisor.slots) == 29)
    assert (
        "rollout worker 0 left: 9 of its workers failed, one after the other" in fleet.reports[-1]
    )


def broken(worker):
    worker.ready = WorkerDied("its GPU is broken")
    return worker


def test_a_worker_whose_node_is_awaited_waits_without_end_and_counts_for_nothing(monkeypatch):
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.05)
    fleet = Fleet(worker0={"dies_after": 0}, worker2={"ready": "later"})
    fleet.places_awaited.add(0)
    submission = fleet.submit(tasks(4))
    until(lambda: len(fleet.workers) == 3)
    time.sleep(0.3)
    assert len(fleet.workers) == 3 and fleet.supervisor.slots[0].deaths == 0
    fleet.places_awaited.clear()
    fleet.workers[2].ready = True
    assert len(submission.results()) == 4


# --- the watch --------------------------------------------------------------------------------------------------------------


def test_the_watch_survives_what_nobody_expected_and_goes_on(monkeypatch, caplog):
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True})
    submission = fleet.submit(tasks(4))
    until(lambda: all(worker.batches for worker in fleet.workers))
    fleet.workers[0].hangs = ValueError("a heartbeat that can't be read")
    until(lambda: "can't be read" in caplog.text)
    fleet.workers[1].hangs = True
    until(lambda: len(fleet.workers) >= 3 and fleet.workers[1].dead)
    # The other one is lost, too, once nothing can be read for long.
    until(lambda: len(fleet.workers) == 4)
    assert any("it can't be watched: ValueError" in report for report in fleet.reports)
    for worker in fleet.workers:
        worker.answer()
    assert len(submission.results()) == 4


def test_an_error_in_looking_for_nodes_does_not_end_the_watch(caplog):
    fleet = Fleet()
    places, fleet.supervisor._elasticity._newcomers = (
        fleet.supervisor._elasticity._newcomers,
        lambda: 1 / 0,
    )
    until(lambda: "ZeroDivisionError" in caplog.text)
    fleet.supervisor._elasticity._newcomers = places
    fleet.coming.append(2)
    until(lambda: len(fleet.supervisor.slots) == 3)


# --- work that nobody wants any more ----------------------------------------------------------------------------------------


def test_workers_are_told_to_stop_what_was_abandoned():
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True})
    submission = fleet.submit(tasks(4))
    until(lambda: all(worker.batches for worker in fleet.workers))
    fleet.workers[0].answer(1)
    until(lambda: submission.arrived)
    submission.close()
    until(lambda: fleet.workers[1].cancelled)
    assert [worker.cancelled for worker in fleet.workers] == [["g1"], ["g2", "g3"]]


@pytest.mark.parametrize("max_running", [None, 1])
def test_groups_that_are_cancelled_are_not_answered_and_the_others_are(max_running):
    fleet = Fleet(n=1, max_running=max_running, worker0={"manual": True})
    submission = fleet.submit(tasks(4))
    until(lambda: fleet.workers[0].batches)
    # The first is being answered, the last may not have been sent.
    fleet.soon("cancel", ["g0", "g3"])
    until(lambda: "g0" in fleet.workers[0].cancelled)
    fleet.workers[0].answer()
    assert [summary.id for summary, _ in submission] == ["g1", "g2"]
    fleet.workers[0].dead = True
    assert len(fleet.submit(tasks(2, "later")).results()) == 2


def test_a_group_that_is_cancelled_before_its_worker_hears_of_it_is_not_sent(monkeypatch):
    fleet = Fleet(n=1, worker0={"manual": True})
    begin = fleet.supervisor.groups.begin

    def begin_and_cancel(submission, order):
        begin(submission, order)
        fleet.supervisor.groups.cancel(["g1"])

    monkeypatch.setattr(fleet.supervisor.groups, "begin", begin_and_cancel)
    submission = fleet.submit(tasks(3))
    fleet.workers[0].answer()
    assert [summary.id for summary, _ in submission] == ["g0", "g2"]
    assert fleet.workers[0].batches == [["g0", "g2"]]


def test_acknowledged_groups_of_a_dying_worker_are_not_sampled_again():
    fleet = Fleet(n=1, worker0={"manual": True})
    submission = fleet.submit(tasks(4))
    until(lambda: fleet.workers[0].batches)
    fleet.workers[0].answer(3)
    until(lambda: len(submission.arrived) == 3)
    fleet.soon("acknowledge", ["g0"])  # ranks have it
    fleet.soon("release", ["g2"])
    until(lambda: fleet.workers[0].released == [["g2"]])
    fleet.workers[0].dead = True
    assert [group for _, group in submission] == [
        "g0 of 0",
        "g1 of 0",
        "g2 of 0",
        "g1 of 1",
        "g3 of 1",
    ]
    assert fleet.workers[1].batches == [["g1", "g3"]]


def test_groups_are_released_by_the_worker_that_has_them():
    fleet = Fleet(n=4)
    results = fleet.submit(tasks(8)).results()
    fleet.soon("release", [summary.id for summary, _ in results[:6]])
    until(lambda: sum(len(worker.released) for worker in fleet.workers) == 3)
    assert [worker.released for worker in fleet.workers] == [
        [["g0", "g1"]],
        [["g2", "g3"]],
        [["g4", "g5"]],
        [],
    ]
    fleet.soon("release", None)
    until(lambda: all(worker.released[-1:] == [None] for worker in fleet.workers))


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_no_worker_is_made_once_the_supervisor_has_stopped():
    fleet = Fleet(2, start=False, worker0={"ready": "never"}, worker1={"ready": "never"})
    fleet.supervisor.run(fleet.supervisor.begin_watch())
    time.sleep(0.05)
    assert fleet.states() == [SlotState.STARTING] * 2
    fleet.supervisor.stop()
    assert not fleet.supervisor._thread.is_alive()
    for worker in fleet.workers:
        worker.dead = True
    time.sleep(0.1)
    assert len(fleet.workers) == 2 and not fleet.reports
    fleet.supervisor.stop()  # a second time does nothing


@pytest.mark.parametrize("shrinks", [False, True])
def test_where_workers_without_a_node_stand(monkeypatch, shrinks):
    events, lost = [], []
    placements = [SimpleNamespace(options={"number": n}) for n in range(3)]
    monkeypatch.setattr(worker_placements.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        worker_placements,
        "find_lost",
        lambda asked: [i for i, options in enumerate(asked) if options["number"] in lost],
    )
    reservation = SimpleNamespace(rollout=placements, elastic=None)
    pool = WorkerPlacements(
        reservation, shrinks=shrinks, report=lambda *event: events.append(event)
    )
    lost[:] = [1]
    assert pool[2] is placements[2] and pool.newcomers() == ()
    assert pool.places([2, 1], 2) == {}, "not while workers may not leave"
    pool.may_change = True
    assert pool.newcomers() == ()
    for _ in range(2):
        assert pool.places([2, 1], 2) == {1: Place.GONE if shrinks else Place.AWAITED}
    assert [kind for kind, _ in events] == ["node_lost"] * (not shrinks), "once"
    assert shrinks or events[0][1].startswith("rollout worker 1 waits for its node")
    assert pool.places([1], 1) == {1: Place.AWAITED}, "the last one waits"
    lost.clear()
    assert pool.places([1], 1) == {}
    monkeypatch.setattr(worker_placements.ray, "is_initialized", lambda: False)
    lost[:] = [1]
    assert pool.places([1], 1) == {}


def test_workers_come_and_go_with_their_nodes(monkeypatch):
    first, second, third = placements = [SimpleNamespace(options={}) for _ in range(3)]
    joined = [[second, third], []]
    elastic = SimpleNamespace(newcomers=lambda: joined.pop(0), lost=lambda p: p is second)
    monkeypatch.setattr(worker_placements.ray, "is_initialized", lambda: True)
    reservation = SimpleNamespace(rollout=[first], elastic=elastic)
    pool = WorkerPlacements(reservation, shrinks=False, report=lambda *event: None)
    assert pool.newcomers() == ()
    pool.may_change = True
    assert list(pool.newcomers()) == [1, 2] and list(pool.newcomers()) == []
    assert [pool[n] for n in range(3)] == placements
    assert pool.places([0, 1, 2], 3) == {1: Place.GONE}
