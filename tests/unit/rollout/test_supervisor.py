"""The supervisor with workers that are objects in this process: what they answer, and when they die, is the test's to say."""

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from rlinf_vl.rollout import submission
from rlinf_vl.rollout import supervisor as module
from rlinf_vl.rollout.submission import Task
from rlinf_vl.rollout.supervisor import Supervisor, WorkerDied, WorkersLost


class Fleet:
    """A supervisor of workers that are objects. `script`: worker0, worker1, … as they are made → what goes wrong with each."""

    def __init__(self, n=2, *, max_running=None, start=True, weights=None, poison=(), **script):
        self.poison = poison
        self.workers, self.reports, self.script = [], [], script
        self.places_lost, self.coming = set(), []
        self.supervisor = Supervisor(
            self.make,
            n,
            max_running=max_running,
            report=lambda message, kind="worker_replaced": self.reports.append(message),
            lost=self.places_lost.__contains__,
            newcomers=lambda: [self.coming.pop() for _ in list(self.coming)],
        )
        self.supervisor.weights = weights
        if start:
            self.supervisor.start()

    def make(self, number):
        self.workers.append(
            FakeWorker(len(self.workers), poison=self.poison, **self.script.get(f"worker{len(self.workers)}", {}))
        )
        return self.workers[-1]

    def submit(self, tasks, check=lambda: None):
        return self.supervisor.submit(tasks, tasks, check)

    def ping(self, number):
        return self.supervisor.call(number, "in the test", "ping").result()


class FakeWorker:
    """Answers at once, or (`manual`) when the test says so; dies, or hangs, after so many groups."""

    def __init__(self, made, *, ready=True, load=None, dies_after=None, hangs_after=None, manual=False, poison=()):
        self.poison = poison  # groups that kill it
        self.made, self.ready, self.load = made, ready, load
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
        result = (
            self.ready if method == "ready" else self.load if method == "load_weights" else (self.made, method, *args)
        )
        if method == "load_weights":
            self.weights = args
        if result == "never":
            await self.until(lambda: False)
        if isinstance(result, Exception):
            raise result
        return result

    async def generate(self, tasks):
        self.batches.append([task.group_id for task in tasks])
        for task in tasks:
            self.dead |= self.dies_after == 0 or (task.group_id in self.poison and not task.fault)
            self.hangs |= self.hangs_after == 0
            await self.until(lambda: (self.allowed and not self.hangs and not self.dead) or self.error)
            if self.error is not None:
                raise self.error
            self.allowed -= 1
            self.dies_after = None if self.dies_after is None else self.dies_after - 1
            self.hangs_after = None if self.hangs_after is None else self.hangs_after - 1
            yield SimpleNamespace(id=task.group_id), task.fault or f"{task.group_id} of {self.made}"

    def answer(self, n=10**9):
        self.allowed += n

    def watch(self):
        pass

    def failure(self):
        return "no heartbeat for 8 s" if self.hangs else None

    def kill(self):
        self.dead = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "WATCH_S", 0.005)
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
    assert (len(one.batches), two.batches[1]) == (1, ["b2"]), "its next share does not wait for the other worker"
    one.answer()
    assert [name for name, _ in answered(second.results())] == ["b0", "b1", "b2"]
    assert [name for name, _ in answered(first.results())] == ["a0", "a1", "a2", "a3", "a4"]


def test_with_a_bound_a_worker_gets_one_more_for_each_that_it_finishes():
    fleet = Fleet(max_running=2, worker0={"manual": True}, worker1={"manual": True})
    submission = fleet.submit(tasks(8))
    one, two = fleet.workers
    until(lambda: one.batches and two.batches)
    assert (one.batches, two.batches) == ([["g0", "g1"]], [["g4", "g5"]]), "four samples each, twice max_running"
    one.answer(1)
    until(lambda: len(one.batches) == 2)
    assert one.batches[1] == ["g2"] and len(two.batches) == 1
    one.answer()
    until(lambda: any("g7" in batch for batch in one.batches))  # it has done its share, and helps the other
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
    assert not any(group.endswith("of 0") for _, group in results), "groups of the dead worker are gone with it"
    (report,) = fleet.reports
    reason = {"dies_after": "killed", "hangs_after": "no heartbeat for 8 s"}[fault]
    assert report.startswith("a rollout worker is replaced and its ") and report.endswith(f"sent again: {reason}")
    assert [slot.restarts for slot in fleet.supervisor.slots] == [1, 0]
    assert fleet.workers[0].dead
    if max_running is None:
        assert fleet.workers[2].batches == fleet.workers[0].batches, "the same tasks make the same batch"


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
    reason = "3 workers died while they answered it, the last one with nothing else to do (data.max_row_faults)"
    assert [name for name, group in results.items() if group == reason] == ["g3", "g5"]
    last = [worker.batches[-1] for worker in fleet.workers if worker.dead]
    assert ["g3"] in last and ["g5"] in last, "each was convicted alone"
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
    fleet = Fleet(worker0={"dies_after": 0}, weights=(lambda: ["bucket"], 7))
    fleet.submit(tasks(4)).results()
    assert fleet.workers[2].weights == (["bucket"], 7)


def test_replacements_that_fail_are_replaced_and_too_many_end_it_in_words(monkeypatch):
    dying = {"ready": WorkerDied("no start")}
    starts = {"worker1": dying, "worker2": {"load": WorkerDied("no weights")}}
    fleet = Fleet(n=1, worker0={"dies_after": 0}, weights=(lambda: [], 1), **starts)
    assert len(fleet.submit(tasks(2)).results()) == 2
    assert [report.rsplit(": ")[1] for report in fleet.reports] == ["killed", "no start", "no weights"]
    monkeypatch.setattr(module, "MAX_REPLACEMENTS", 2)
    fleet = Fleet(n=1, worker0={"dies_after": 0}, worker1=dying, worker2=dying)
    with pytest.raises(WorkersLost, match="3 rollout workers failed since .*: no start"):
        fleet.submit(tasks(2)).results()
    monkeypatch.undo()
    assert len(fleet.submit(tasks(2)).results()) == 2, "the next submission has another try"


def test_a_replacement_that_does_not_start_or_hangs_with_the_weights_is_replaced(monkeypatch):
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.05)
    fleet = Fleet(n=1, worker0={"dies_after": 0}, worker1={"ready": "never"}, worker2={"load": "never"})
    fleet.supervisor.weights = (lambda: [], 1)
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


def test_weights_that_a_worker_was_offered_are_taken_by_it_or_by_its_replacement():
    fleet = Fleet()
    fleet.workers[1].dead = True
    fleet.supervisor.weights = (lambda: [], 3)
    for i, worker in enumerate(list(fleet.workers)):
        fleet.supervisor.settle(i, worker, worker.call("take_weights")).result()
    assert len(fleet.workers) == 3 and fleet.workers[2].weights == ([], 3)
    assert fleet.reports == ["a rollout worker is replaced during a weight sync: killed"]


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

    fleet.supervisor.weights = (gone, 1)
    with pytest.raises(OSError, match="the ranks are dead"):
        fleet.submit(tasks(4)).results()
    fleet.supervisor.weights = None
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
    until(lambda: not any(slot.given or slot.streams for slot in fleet.supervisor.slots))
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
    assert len(fleet.workers) == 3 and fleet.workers[0].dead and fleet.supervisor.replaced == 0
    (report,) = fleet.reports
    assert report.startswith("rollout worker 0 left: ") and "2 others do its work" in report
    assert len(fleet.submit(tasks(4)).results()) == 4


@pytest.mark.parametrize("told", [True, False])
def test_a_place_that_is_lost_while_its_worker_is_replaced(told):
    """The replacement dies with it, or waits for the place for ever."""
    fleet = Fleet(worker0={"dies_after": 0}, worker2={"ready": "never"})
    submission = fleet.submit(tasks(4))
    until(lambda: len(fleet.workers) == 3)
    fleet.places_lost.add(0)
    fleet.workers[2].dead |= told
    assert {group[-1] for _, group in answered(submission.results())} == {"1"}


@pytest.mark.parametrize("max_running", [None, 2])
def test_a_worker_that_joins_gets_the_current_weights_and_then_work(max_running):
    fleet = Fleet(
        max_running=max_running, weights=(lambda: ["bucket"], 7), worker0={"manual": True}, worker1={"manual": True}
    )
    first = fleet.submit(tasks(12, "a"))
    until(lambda: fleet.workers[0].batches and fleet.workers[1].batches)
    with fleet.supervisor.membership:  # a sync
        fleet.coming.append(2)
        until(lambda: len(fleet.workers) == 3)
        time.sleep(0.1)
        assert fleet.workers[2].weights is None and len(fleet.supervisor.slots) == 2
        fleet.supervisor.weights = (lambda: ["newer"], 8)
    until(lambda: len(fleet.supervisor.slots) == 3)
    assert fleet.workers[2].weights == (["newer"], 8)
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
    assert fleet.reports == ["rollout worker 2 did not join: WorkerDied: no start"]
    assert len(fleet.workers) == 5 and all(worker.dead for worker in fleet.workers[2:])
    assert len(fleet.submit(tasks(4)).results()) == 4


def test_calls_and_syncs_do_not_wait_for_one_that_leaves():
    fleet = Fleet(weights=(lambda: [], 3))
    fleet.places_lost.add(1)
    fleet.workers[1].dead = True
    with fleet.supervisor.membership:
        taken = [(slot.number, slot.worker, slot.worker.call("take_weights")) for slot in fleet.supervisor.slots]
        settled = [fleet.supervisor.settle(*one) for one in taken]
        assert [future.result() for future in settled] == [(0, "take_weights"), None]
        assert fleet.ping(1) is None
    until(lambda: len(fleet.supervisor.slots) == 1)
    assert fleet.ping(0) == (0, "ping")


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
