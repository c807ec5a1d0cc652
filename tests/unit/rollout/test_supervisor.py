"""The supervisor with workers that are objects in this process: what they answer, and when they die, is the test's to say."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from rlinf_vl.rollout import supervisor as module
from rlinf_vl.rollout.supervisor import Supervisor, Task, WorkerDied, WorkersLost


class Fleet:
    """Workers, and the `wait` and `outcome` that go with them. Handles are numbers."""

    def __init__(self, n=2, *, max_running=None, report=None, **script):
        self.numbers = itertools.count()
        self.answers = {}  # handle → list of values and exceptions that it comes to, in order
        self.workers = []
        self.reports = []
        self.script = script  # n-th worker made → what goes wrong with it
        self.changed = threading.Condition()
        self.supervisor = Supervisor(
            self.make, n, wait=self.wait, outcome=self.outcome, max_running=max_running, report=self.reports.append
        )
        self.supervisor.start()

    def make(self, number):
        self.workers.append(FakeWorker(self, number, **self.script.get(f"worker{len(self.workers)}", {})))
        return self.workers[-1]

    def put(self, handle, *answers):
        with self.changed:
            self.answers.setdefault(handle, []).extend(answers)
            self.changed.notify_all()

    def wait(self, handles, seconds):
        with self.changed:
            self.changed.wait_for(lambda: any(self.answers.get(h) for h in handles), seconds)
            return [h for h in handles if self.answers.get(h)][:1]

    def outcome(self, handle):
        answer = self.answers[handle].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def submit(self, tasks, check=lambda: None):
        return self.supervisor.submit(tasks, tasks, check)


class FakeWorker:
    def __init__(self, fleet, slot, *, ready=True, load=None, dies_after=None, hangs_after=None, manual=False):
        self.fleet, self.slot, self.ready, self.load = fleet, slot, ready, load
        self.dies_after, self.hangs_after, self.manual = dies_after, hangs_after, manual
        self.made, self.dead, self.hangs, self.weights = len(fleet.workers), False, False, None
        self.batches, self.calls, self.open = [], [], []

    def call(self, method, *args):
        handle = next(self.fleet.numbers)
        if self.dead:
            self.fleet.put(handle, WorkerDied("killed"))
        elif method == "ready":
            self.fleet.put(handle, self.ready)
        elif method == "load_weights":
            self.weights = args
            self.fleet.put(handle, self.load)
        elif method == "generate":
            self.batches.append([task.group_id for task in args[0]])
            self.open.append((handle, list(args[0])))
            if not self.manual:
                self.answer()
        else:
            self.calls.append((method, *args))
            self.fleet.put(handle, (self.made, method, *args))
        return handle

    def answer(self, n=10**6):
        """Deliver the next n groups; die or hang where the script says so."""
        for handle, tasks in list(self.open):
            while tasks and n and not self.dead and not self.hangs:
                if self.dies_after == 0:
                    self.die()
                    break
                if self.hangs_after == 0:
                    self.hangs = True
                    break
                task = tasks.pop(0)
                n -= 1
                self.fleet.put(handle, (SimpleNamespace(id=task.group_id), f"{task.group_id} of {self.made}"))
                self.dies_after = None if self.dies_after is None else self.dies_after - 1
                self.hangs_after = None if self.hangs_after is None else self.hangs_after - 1
            if not tasks and not self.dead:
                self.open.remove((handle, tasks))
                self.fleet.put(handle, StopIteration())

    def die(self):
        self.dead = True
        for handle, _ in self.open:
            self.fleet.put(handle, WorkerDied("killed"))

    def watch(self):
        self.watched = True

    def failure(self):
        return "no heartbeat for 8 s" if self.hangs else None

    def kill(self):
        self.dead = True


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
    until(lambda: len(one.batches) == 2)
    one.answer()
    two.answer()
    assert [name for name, _ in answered(second.results())] == ["b0", "b1", "b2"]
    assert [name for name, _ in answered(first.results())] == ["a0", "a1", "a2", "a3", "a4"]


def test_with_a_bound_a_worker_gets_one_more_for_each_that_it_finishes():
    fleet = Fleet(max_running=2, worker0={"manual": True}, worker1={"manual": True})
    submission = fleet.submit(tasks(8))
    one, two = fleet.workers
    until(lambda: one.batches and two.batches)
    assert (one.batches, two.batches) == ([["g0", "g1"]], [["g2", "g3"]]), "four samples each, twice max_running"
    one.answer(1)
    until(lambda: len(one.batches) == 2)
    assert one.batches[1] == ["g4"] and len(two.batches) == 1
    while not fleet.answers.get("done") and len(one.batches) + len(two.batches) < 6:
        one.answer(1)
        two.answer(1)
        time.sleep(0.001)
    threading.Thread(target=lambda: [(one.answer(), two.answer(), time.sleep(0.01)) for _ in range(20)]).start()
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
def test_two_submissions_in_flight_lose_nothing_when_a_worker_dies(max_running):
    fleet = Fleet(max_running=max_running, worker0={"dies_after": 3}, worker2={"hangs_after": 1})
    train, val = fleet.submit(tasks(9, "t")), fleet.submit(tasks(5, "v", samples=1))
    assert [name for name, _ in answered(val.results())] == [f"v{i}" for i in range(5)]
    assert [name for name, _ in answered(train.results())] == [f"t{i}" for i in range(9)]


def test_replacements_get_the_current_weights_before_any_work():
    fleet = Fleet(worker0={"dies_after": 0})
    fleet.supervisor.weights = (lambda: ["bucket"], 7)
    fleet.submit(tasks(4)).results()
    assert fleet.workers[2].weights == (["bucket"], 7)


def test_replacements_that_fail_are_replaced_and_too_many_end_it_in_words(monkeypatch):
    dying = {"ready": WorkerDied("no start")}
    fleet = Fleet(n=1, worker0={"dies_after": 0}, worker1=dying, worker2={"load": WorkerDied("no weights")})
    fleet.supervisor.weights = (lambda: [], 1)
    assert len(fleet.submit(tasks(2)).results()) == 2
    assert [report.rsplit(": ")[1] for report in fleet.reports] == ["killed", "no start", "no weights"]
    monkeypatch.setattr(module, "MAX_REPLACEMENTS", 2)
    fleet = Fleet(n=1, worker0={"dies_after": 0}, worker1=dying, worker2=dying)
    with pytest.raises(WorkersLost, match="3 rollout workers failed since .*: no start"):
        fleet.submit(tasks(2)).results()
    monkeypatch.undo()
    assert len(fleet.submit(tasks(2)).results()) == 2, "the next submission has another try"


def test_a_replacement_that_never_starts_is_replaced(monkeypatch):
    fleet = Fleet(n=1, worker0={"dies_after": 0})
    fleet.submit([]).results()
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(fleet, "script", {"worker1": {}})
    silent, fleet.workers[0].fleet = fleet.put, fleet
    monkeypatch.setattr(fleet, "put", lambda handle, *answers: None if answers == (True,) else silent(handle, *answers))
    submission = fleet.submit(tasks(2))
    until(lambda: any("did not start within" in report for report in fleet.reports))
    monkeypatch.undo()
    assert len(submission.results()) == 2


def test_calls_are_made_again_on_the_replacement():
    fleet = Fleet()
    assert fleet.supervisor.results([fleet.supervisor.call(i, "at test", "ping", i) for i in (0, 1)]) == [
        (0, "ping", 0),
        (1, "ping", 1),
    ]
    fleet.workers[0].dead = True
    futures = [fleet.supervisor.call(0, "in the test", name) for name in ("ping", "pong")]
    assert [result[:2] for result in fleet.supervisor.results(futures)] == [(2, "ping"), (2, "pong")]
    assert fleet.reports == ["a rollout worker is replaced in the test: killed"]


def test_what_was_asked_of_a_worker_outside_ends_with_its_answer_or_its_replacement():
    fleet = Fleet()
    fleet.supervisor.results([fleet.supervisor.call(i, "", "ping") for i in (0, 1)])
    fleet.put("given", None)
    fleet.put("lost", WorkerDied("killed"))
    futures = [fleet.supervisor.watch(i, "during a sync", handle) for i, handle in enumerate(("given", "lost"))]
    fleet.supervisor.weights = (lambda: [], 3)
    fleet.supervisor.results(futures)
    assert len(fleet.workers) == 3 and fleet.workers[2].weights == ([], 3)


def test_the_error_of_a_task_ends_its_submission_alone():
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True}, max_running=8)
    bad, good = fleet.submit(tasks(2, "bad")), fleet.submit(tasks(2, "good"))
    until(lambda: all(len(worker.batches) == 2 for worker in fleet.workers))
    fleet.put(fleet.workers[0].open[0][0], ValueError("odd row"))
    with pytest.raises(ValueError, match="odd row"):
        bad.results()
    for worker in fleet.workers:
        worker.answer()
    assert len(good.results()) == 2
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
    fleet = Fleet(worker1={"ready": death})
    with pytest.raises(ValueError, match="no such model"):
        fleet.supervisor.results([fleet.supervisor.call(1, "while it starts", "ready")])
    assert len(fleet.workers) == 2


def test_a_process_that_dies_while_the_run_starts_is_replaced():
    fleet = Fleet(worker1={"ready": WorkerDied("killed")})
    assert fleet.supervisor.results([fleet.supervisor.call(1, "while it starts", "ready")]) == [True]
    assert fleet.reports == ["a rollout worker is replaced while it starts: killed"]


def test_waiting_asks_whether_to_stop_and_what_is_left_is_abandoned(monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True})
    asked = itertools.count()

    def check():
        if next(asked) == 3:
            raise InterruptedError("stop")

    with pytest.raises(InterruptedError):
        fleet.submit(tasks(4), check).results()
    assert not any(slot.handles or slot.given for slot in fleet.supervisor.slots)
    for worker in fleet.workers:
        worker.manual = False
    assert len(fleet.submit(tasks(4)).results()) == 4


def test_all_workers_can_be_replaced_in_the_middle_of_a_submission():
    fleet = Fleet(worker0={"manual": True}, worker1={"manual": True})
    submission = fleet.submit(tasks(4))
    until(lambda: all(worker.batches for worker in fleet.workers))
    fleet.workers[1].answer(1)
    fleet.supervisor.replace_all()
    assert {group[-1] for _, group in answered(submission.results())} == {"2", "3"}
    assert fleet.workers[0].dead and fleet.workers[1].dead


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
