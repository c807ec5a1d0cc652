"""Slots, syncs and work as a model: random events on the real supervisor, in virtual time, with workers that obey the test.

Workers start, hang, die, join, leave and lose their nodes; syncs (whole weights, changes, broadcasts) begin, are made and
settled; groups are submitted, finished, cancelled, acknowledged and released, in any order. After every event:
- Each task of a submission is answered exactly once: its group comes again only after it was said to be lost.
- A group that was acknowledged or cancelled is not sampled again.
- A worker that is live holds the newest weights, or, while a sync is under way, those before them.
- A sync waits for nobody but live workers that it was sent to. Only live workers have work.
In the end, when no more goes wrong, all work is done, and no task of the event loop, thread, worker or stored group is left.

MEMBERSHIP_EVENTS sets how many events there are: 5,000 unless it is set, 100,000 take minutes.
"""

import asyncio
import os
import random
import threading
import time
from types import SimpleNamespace

import pytest

from rlinf_vl.rollout.pool import elasticity, supervisor, updates
from rlinf_vl.rollout.pool.slot import Place, SlotState, WorkerDied, WorkersLost
from rlinf_vl.rollout.pool.supervisor import Supervisor
from rlinf_vl.rollout.submission import GroupArrived, GroupsResent, SubmissionEnded, Task
from rlinf_vl.weights.sender import Snapshot

EVENTS = int(os.environ.get("MEMBERSHIP_EVENTS", "5000"))
#: Events from the start of a supervisor to its end.
EVENTS_PER_RUN = 250
#: Virtual seconds that a call takes in a thread.
THREAD_S = 0.3


#: The events: a weight, whether it can happen now, and what happens.
EVENT_TABLE = []


def event(weight, needs=lambda model: True):
    """Register a method of the model, which gets a source of random numbers, as an event."""

    def register(method):
        EVENT_TABLE.append((weight, needs, method))
        return method

    return register


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands while there is something to do, and otherwise jumps to the next timer."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            # As any clock, it never stands for two looks.
            self.now = max(self.now + 1e-6, self._scheduled[0]._when)
        super()._run_once()

    def drain(self):
        """Run until nothing happens any more before the clock goes on."""
        self.call_soon(self.stop)
        self.run_forever()
        while self._ready:
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds):
        self.run_until_complete(asyncio.sleep(seconds))
        self.drain()


async def in_thread(function, *arguments):
    await asyncio.sleep(THREAD_S)
    return function(*arguments)


class ModelWorker:
    """A worker that answers a call, or finishes a group, when the model says so."""

    def __init__(self, model, number):
        self.model, self.number = model, number
        self.dead = self.hangs = self.killed = False
        self.version = 0
        self.calls = []  # method, arguments, future
        self.groups = {}  # that it is sampling, by id → the queue of their stream
        self.stored = set()

    async def call(self, method, *arguments):
        future = asyncio.get_running_loop().create_future()
        if self.dead:
            raise WorkerDied("dead")
        entry = method, arguments, future
        self.calls.append(entry)
        try:
            return await future
        finally:
            if entry in self.calls:
                self.calls.remove(entry)

    async def generate(self, tasks):
        if self.dead:
            raise WorkerDied("dead")
        inbox, waiting = asyncio.Queue(), {task.group_id for task in tasks}
        assert not waiting & self.groups.keys(), "it is sampling these already"
        for task in tasks:
            self.model.note_begun(task)
        self.groups |= dict.fromkeys(waiting, inbox)
        by_id = {task.group_id: task for task in tasks}
        try:
            while waiting:
                group_id, reference = await inbox.get()
                if isinstance(reference, Exception):
                    raise reference
                waiting.discard(group_id)
                if reference is not None:
                    stored = not by_id[group_id].summary_only
                    if stored:
                        self.stored.add(group_id)
                    yield SimpleNamespace(id=group_id), reference
        finally:
            for group_id in waiting:
                if self.groups.get(group_id) is inbox:
                    del self.groups[group_id]

    def finish(self, group_id):
        self.groups.pop(group_id).put_nowait((group_id, self))

    def cancel(self, group_ids):
        for group_id in group_ids:
            if group_id in self.groups:
                self.groups.pop(group_id).put_nowait((group_id, None))

    def release(self, group_ids):
        self.stored = set() if group_ids is None else self.stored.difference(group_ids)

    def watch(self):
        pass

    def failure(self):
        return "dead" if self.dead else "hangs" if self.hangs else None

    def kill(self):
        self.killed = True
        self.die("killed")

    def die(self, reason="dead"):
        if self.dead:
            return
        self.dead = True
        for _, _, future in self.calls:
            if not future.done():
                future.set_exception(WorkerDied(reason))
        for inbox in set(self.groups.values()):
            inbox.put_nowait(("", WorkerDied(reason)))
        self.groups = {}


class Ledger:
    """What has come of a submission, as whoever waits for it sees it."""

    def __init__(self, submission):
        self.submission = submission
        self.arrived, self.acknowledged, self.cancelled, self.ended, self.error = (
            set(),
            set(),
            set(),
            False,
            None,
        )

    def read(self):
        while not self.submission.events.empty():
            event = self.submission.events.get()
            assert not self.ended, "an event after the end"
            if isinstance(event, GroupArrived):
                group_id = event.summary.id
                assert group_id in self.submission.group_ids
                assert group_id not in self.arrived, f"{group_id} came twice"
                assert group_id not in self.cancelled, f"{group_id} came although it was cancelled"
                self.arrived.add(group_id)
            elif isinstance(event, GroupsResent):
                assert event.group_ids <= self.arrived, "what never came is said to come again"
                assert not event.group_ids & self.acknowledged, "what was acknowledged comes again"
                self.arrived -= event.group_ids
            else:
                assert isinstance(event, SubmissionEnded)
                self.ended, self.error = True, event.error
                assert event.error is None or isinstance(event.error, WorkersLost), event.error


class Membership:
    """The supervisor, and what the world does to it."""

    def __init__(self, draw):
        n, max_running = draw.randint(1, 5), draw.choice([None, 2, 6])
        supervisor.MAX_DEATHS = draw.choice([8, 10**6, 10**6])
        self.loop = VirtualLoop()
        self.workers, self.ledgers, self.calls, self.newcomers = [], [], [], []
        self.places, self.next_number, self.next_group, self.version = {}, n, 0, 0
        self.sent, self.sync, self.settling, self.whole_next, self.begun = (
            None,
            None,
            None,
            True,
            {},
        )
        self.lost = False
        self.threads = set(threading.enumerate())
        self.reports = []
        self.supervisor = Supervisor(
            self.make,
            n,
            max_running=max_running,
            report=lambda message, kind="worker_replaced": self.reports.append(message),
            places=lambda numbers: {k: place for k, place in self.places.items() if k in numbers},
            newcomers=self.take_newcomers,
            loop=self.loop,
            in_thread=in_thread,
        )
        self.watch = self.loop.create_task(self.supervisor.begin_watch())
        self.loop.drain()

    def make(self, number):
        self.workers.append(ModelWorker(self, number))
        return self.workers[-1]

    def take_newcomers(self):
        coming, self.newcomers = self.newcomers, []
        return coming

    def note_begun(self, task):
        for ledger in self.ledgers:
            if task.group_id in ledger.submission.group_ids:
                assert task.group_id not in ledger.acknowledged, (
                    "what was acknowledged is sampled again"
                )
                assert task.group_id not in ledger.cancelled, "what was cancelled is sampled"

    # --- what there is --------------------------------------------------------------------------------------------------

    def slots(self):
        return [*self.supervisor.slots, *self.supervisor.joining]

    def alive(self):
        return [slot.worker for slot in self.slots() if not slot.worker.dead]

    def pending_calls(self):
        """Calls that may be answered: weights can't be taken before they are made, and no worker starts without a node."""
        return [
            (worker, call)
            for worker in self.alive()
            for call in worker.calls
            if not worker.hangs and not call[2].done() and self.may_answer(worker, call[0])
        ]

    def may_answer(self, worker, method):
        if method == "ready":
            return worker.number not in self.places
        return method != "take" or self.sync is None or self.sync.made

    def groups(self):
        return [
            (worker, group_id)
            for worker in self.alive()
            if not worker.hangs
            for group_id in worker.groups
        ]

    def answer(self, worker, call):
        method, arguments, future = call
        if method == "load_snapshot":
            worker.version = arguments[0].version
        if method == "take":
            kind, base, version, receivers = arguments
            assert kind != "delta" or worker.version == base, (
                "changes of weights that it does not have"
            )
            assert receivers is None or worker in receivers, "it is in no group of the broadcast"
            worker.version = version
        future.set_result(method)

    # --- workers --------------------------------------------------------------------------------------------------------

    @event(6, lambda self: self.pending_calls())
    def a_call_is_answered(self, draw):
        pending = self.pending_calls()
        self.answer(*draw.choice(pending))
        self.loop.drain()

    @event(6, lambda self: self.pending_calls())
    def all_calls_are_answered(self, draw):
        for worker, call in self.pending_calls():
            self.answer(worker, call)
        self.loop.drain()

    @event(1, lambda self: self.alive())
    def a_worker_dies(self, draw):
        draw.choice(self.alive()).die()
        self.loop.drain()

    @event(1, lambda self: self.alive())
    def a_worker_hangs(self, draw):
        draw.choice(self.alive()).hangs = True

    @event(2)
    def a_worker_goes_on(self, draw):
        hanging = [worker for worker in self.alive() if worker.hangs]
        if hanging:
            draw.choice(hanging).hangs = False

    @event(1, lambda self: self.pending_calls())
    def a_constructor_or_a_load_fails(self, draw):
        pending = [
            (w, c) for w, c in self.pending_calls() if c[0] in ("ready", "load_snapshot", "take")
        ]
        if pending:
            worker, (_, _, future) = draw.choice(pending)
            future.set_exception(WorkerDied("its engine is dead"))
            self.loop.drain()

    @event(0.5, lambda self: self.slots())
    def a_node_is_lost(self, draw):
        place = draw.choice([Place.GONE, Place.AWAITED])
        number = draw.choice(self.slots()).number
        self.places[number] = place
        for worker in self.alive():
            if worker.number == number:
                worker.die("its node is lost")
        self.loop.drain()

    @event(2)
    def awaited_nodes_come_back(self, draw):
        self.places = {
            number: place for number, place in self.places.items() if place is Place.GONE
        }

    @event(1, lambda self: len(self.slots()) + len(self.newcomers) < 7)
    def a_node_joins(self, draw):
        self.newcomers.append(self.next_number)
        self.next_number += 1

    @event(6)
    def time_passes(self, draw):
        seconds = draw.choice([0.2, 5.0, 20.0, 120.0])
        self.loop.advance(seconds)

    # --- syncs ----------------------------------------------------------------------------------------------------------

    @event(3, lambda self: self.sync is None)
    def a_sync_begins(self, draw):
        kind = draw.choice(["whole", "delta", "broadcast"])
        if self.whole_next and kind == "delta":
            kind = "whole"
        self.sync = SimpleNamespace(
            kind=kind, base=self.version, offered=False, made=False, update=None
        )
        if kind == "broadcast":
            self.sync.update = self.supervisor.updates.open()
            self.sync.receivers = [worker for _, worker in self.sync.update.receivers]
        self.loop.drain()

    @event(3, lambda self: self.sync is not None and not self.sync.offered)
    def its_weights_are_offered(self, draw):
        sync = self.sync
        self.version += 1
        sync.offered = True
        update, updates = sync.update, self.supervisor.updates
        receivers = sync.receivers if sync.kind == "broadcast" else None
        arguments = "take", sync.kind, sync.base, self.version, receivers

        async def offer():
            take = lambda worker: worker.call(*arguments)  # noqa: E731
            sync.update = updates.offer(
                update, take, self.version, self.snapshot, receivers is None
            )

        self.loop.run_until_complete(offer())
        self.loop.drain()

    @event(3, lambda self: self.sync is not None and self.sync.offered and not self.sync.made)
    def its_weights_are_made(self, draw):
        self.sync.made, self.sent, self.whole_next = True, self.version, False
        self.sync.settled_from = self.loop.now
        self.settling = self.loop.create_task(self.supervisor.updates.settle(self.sync.update))
        self.loop.drain()

    @event(0.3, lambda self: self.sync is None)
    def weights_are_forgotten(self, draw):
        """As when the ranks start again."""
        self.loop.call_soon(self.supervisor.updates.forget)
        self.loop.drain()
        self.sent, self.whole_next = None, True

    def snapshot(self):
        return None if self.sent is None else Snapshot(self.sent, [])

    # --- work -----------------------------------------------------------------------------------------------------------

    @event(4, lambda self: sum(not ledger.ended for ledger in self.ledgers) < 4)
    def groups_are_submitted(self, draw):
        n = draw.randint(1, 6)
        samples = draw.randint(1, 3)
        summary_only = draw.random() < 0.3
        self.submit(n, samples, summary_only)

    def submit(self, n, samples=1, summary_only=False):
        names = [f"g{self.next_group + k}" for k in range(n)]
        self.next_group += n
        rows = range(self.next_group - n, self.next_group)
        asked = [
            Task(name, "train", row, tuple(range(samples)), summary_only=summary_only)
            for name, row in zip(names, rows, strict=True)
        ]
        self.ledgers.append(Ledger(self.supervisor.submit(asked, asked, lambda: None)))
        self.loop.drain()

    @event(10, lambda self: self.groups())
    def a_group_is_finished(self, draw):
        worker, group_id = draw.choice(self.groups())
        worker.finish(group_id)
        self.loop.drain()

    @event(2, lambda self: self.groups())
    def all_groups_are_finished(self, draw):
        for worker, group_id in self.groups():
            worker.finish(group_id)
        self.loop.drain()

    @event(1, lambda self: self.ledgers)
    def groups_are_cancelled(self, draw):
        n = draw.randint(1, 3)
        ledger = draw.choice(self.ledgers)
        names = sorted(ledger.submission.group_ids - ledger.arrived)[:n]
        self.supervisor.soon(self.supervisor.groups.cancel, names)
        ledger.cancelled.update(names)
        ledger.acknowledged -= set(names)
        self.loop.drain()

    @event(0.5, lambda self: self.ledgers)
    def a_submission_is_abandoned(self, draw):
        draw.choice(self.ledgers).submission.close()
        self.loop.drain()

    @event(3, lambda self: self.ledgers)
    def groups_are_acknowledged(self, draw):
        release = draw.random() < 0.3
        ledger = draw.choice(self.ledgers)
        names = sorted(ledger.arrived)[: draw.randint(1, 3)]
        groups = self.supervisor.groups
        self.supervisor.soon(groups.release if release else groups.acknowledge, names)
        ledger.acknowledged.update(names)
        self.loop.drain()

    @event(2, lambda self: self.supervisor.slots and len(self.calls) < 20)
    def a_worker_is_called(self, draw):
        number = draw.choice(self.supervisor.slots).number
        self.calls.append(self.supervisor.call(number, "in the model", "ping"))
        self.loop.drain()

    # --- what holds at any time -----------------------------------------------------------------------------------------

    def holds(self):
        for ledger in self.ledgers:
            ledger.read()
            if ledger.error is not None:  # the run is over
                dispatched, spent = self.supervisor.slots, self.supervisor._spent_deaths
                assert (
                    self.lost
                    or sum(slot.deaths for slot in dispatched) + spent > supervisor.MAX_DEATHS
                )
                self.lost = True
            if ledger.ended and ledger.error is None and ledger.submission.done:
                assert ledger.arrived | ledger.cancelled == ledger.submission.group_ids
        self.settled()
        self.holds_of_slots()
        self.holds_of_work()

    def settled(self):
        """See to the end of a sync: all that are live hold its weights, and it waits for nobody else."""
        if self.settling is not None and self.settling.done():
            answers = self.settling.result()
            assert all(answer in ("take", None) for answer in answers)
            self.sync = self.settling = None
        elif self.settling is not None:
            update = self.sync.update
            chosen = dict(update.receivers)
            for slot, task in update.answers.items():
                assert task.done() or not chosen[slot].killed, (
                    "a sync waits for a worker that was killed"
                )
            limit_s = updates.LOAD_TIMEOUT_S * (len(chosen) + 2)
            assert self.loop.now - self.sync.settled_from < limit_s, (
                "a sync waits for a worker that is too slow"
            )

    def holds_of_slots(self):
        updates = self.supervisor.updates
        for slot in self.slots():
            if slot.live and updates.newest is not None:
                under_way = updates.update is not None and updates.update.key is not None
                allowed = {updates.newest, updates.update.base} if under_way else {updates.newest}
                # Otherwise weights were forgotten, which workers still hold.
                if None not in allowed:
                    assert slot.weights in allowed, (slot.weights, allowed)
                assert slot.weights is None or slot.worker.version == slot.weights[1]
            if slot.live and not slot.worker.dead:
                answering = {group_id for _, group_id in slot.answering}
                assert slot.worker.groups.keys() <= answering, "what nobody wants is sampled"
            if not slot.live:
                assert not (slot.sent_tasks or slot.answering or slot.streams or slot.stored), slot
            assert slot.state is not SlotState.LEAVING, "a slot that leaves has no work"
        current = {id(slot.worker) for slot in self.slots()}
        assert len(current) == len(self.slots())

    def holds_of_work(self):
        """Each task that is open is in one place, and none waits where a live worker has room."""
        dispatcher = self.supervisor.groups
        places = [entry for slot in dispatcher.slots for entry in slot.queue] + dispatcher._unshared
        queued = [(submission, task.group_id) for submission, task in places]
        sent = [key for slot in dispatcher.slots for key in slot.answering]
        assert not dispatcher._unshared or not dispatcher.slots
        waiting = [
            (submission, group_id)
            for submission in dispatcher._open
            for group_id in submission.group_ids - submission.arrived - submission.cancelled
        ]
        assert sorted(map(hash, queued + sent)) == sorted(map(hash, waiting)), (
            "a task is lost, or is there twice"
        )
        assert all(
            not slot.queue
            for slot in dispatcher.slots
            if slot.live and not slot.streams and not slot.answering
        )

    # --- the end --------------------------------------------------------------------------------------------------------

    def heal(self):
        """Let nothing go wrong any more, and all that is pending be done."""
        self.places = {
            number: place for number, place in self.places.items() if place is Place.GONE
        }
        for worker in self.alive():
            worker.hangs = False
        for worker, call in self.pending_calls():
            self.answer(worker, call)
        for worker, group_id in self.groups():
            worker.finish(group_id)
        self.loop.advance(5.0)
        self.holds()

    def end(self, draw):
        if self.sync is not None and not self.sync.offered:
            self.its_weights_are_offered(draw)
        if self.sync is not None and not self.sync.made:
            self.its_weights_are_made(draw)
        self.a_node_joins(draw)  # all others may have left
        for _ in range(40):
            self.heal()
        self.submit(5)  # whatever has given up tries again
        for _ in range(40):
            if all(ledger.ended for ledger in self.ledgers) and self.sync is None:
                break
            self.heal()
        assert self.sync is None, "a sync never ends"
        assert all(ledger.ended for ledger in self.ledgers), "a submission never ends"
        if not self.lost:
            self.all_is_well()
        self.supervisor.stop()
        self.loop.run_forever()
        assert not asyncio.all_tasks(self.loop)
        # A thread that has given its result may need a moment to end on a busy machine.
        deadline = time.monotonic() + 30
        while (left := set(threading.enumerate()) - self.threads) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left
        self.loop.close()

    def all_is_well(self):
        assert self.ledgers[-1].error is None and len(self.ledgers[-1].arrived) == 5
        for ledger in self.ledgers:
            self.supervisor.soon(self.supervisor.groups.release, ledger.arrived)
        for _ in range(3):
            self.heal()
        assert all(call.done() for call in self.calls)
        assert all(slot.live for slot in self.supervisor.slots) and not self.supervisor.joining
        assert not any(
            slot.worker.stored or slot.sent_tasks or slot.streams or slot.calls
            for slot in self.slots()
        )
        current = {id(slot.worker) for slot in self.slots()}
        assert all(worker.killed for worker in self.workers if id(worker) not in current), (
            "a worker was left alive"
        )
        assert not any(worker.groups for worker in self.workers), "what nobody wants is sampled"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_membership_holds_through_random_events(monkeypatch):
    """Time limits are of one order, so that each is met."""
    monkeypatch.setattr(supervisor, "MAX_DEATHS", supervisor.MAX_DEATHS)  # the model sets it
    monkeypatch.setattr(supervisor, "WATCH_S", 5.0)
    monkeypatch.setattr(elasticity, "LOOK_S", 5.0)
    monkeypatch.setattr(supervisor, "START_TIMEOUT_S", 100.0)
    monkeypatch.setattr(updates, "LOAD_TIMEOUT_S", 60.0)
    seed, events = 0, 0
    while events < EVENTS:
        draw, happened = random.Random(seed), []
        model = Membership(draw)
        try:
            while len(happened) < EVENTS_PER_RUN and not model.lost:
                possible = [
                    (weight, method) for weight, needs, method in EVENT_TABLE if needs(model)
                ]
                (happening,) = draw.choices(
                    [method for _, method in possible], [weight for weight, _ in possible]
                )
                happened.append(happening.__name__)
                happening(model, draw)
                model.holds()
            model.end(draw)
        except BaseException as error:
            error.add_note(f"seed {seed}, event {len(happened)}: … {', '.join(happened[-30:])}")
            raise
        seed, events = seed + 1, events + len(happened)
