"""A rollout worker as a real Ray actor, with tasks that the test answers: what the supervisor may ask of it meanwhile."""

import asyncio
import time
from types import SimpleNamespace

import pytest
import ray

from rlinf_vl.engines.base import EngineDied
from rlinf_vl.rollout.episode.batch_stream import STREAM_MESSAGES
from rlinf_vl.rollout.pool.slot import WorkerDied
from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.rollout.pool.worker_handle import WorkerHandle
from rlinf_vl.rollout.submission import Task
from tests.object_store import used_bytes

pytestmark = pytest.mark.integration
#: More than the calls that Ray lets an actor run at once.
N_OPEN = 1200
#: Seconds after which an answer will not come.
LONG_S = 60.0
#: Bytes of a group in the object store.
STORED_BYTES = 2**20


class Rank(RolloutRank):
    """A worker whose engine and player are the test's: groups finish when it says so."""

    def __init__(self):
        self.open_batches, self.reports, self.batch_errors, self.batch_tasks = (
            [],
            asyncio.Queue(),
            {},
            set(),
        )
        self.allowed, self.begun, self.left, self.released, self.loaded = (
            asyncio.Event(),
            [],
            [],
            [],
            [],
        )

    async def generate(self, tasks):
        self.begun += [task.group_id for task in tasks]
        try:
            if not any(task.group_id.startswith("now") for task in tasks):
                await self.allowed.wait()
            for task in tasks:
                if task.fault:
                    raise EngineDied(task.fault) if task.row else KeyError(task.fault)
                stored = ray.put(bytes(STORED_BYTES)) if task.group_id == "now stored" else task.row
                yield [(SimpleNamespace(id=task.group_id), stored)]
        finally:
            self.left += [task.group_id for task in tasks]

    async def allow(self):
        self.allowed.set()

    async def heartbeat(self):
        return True

    async def load_weights(self, buckets, version):
        self.loaded.append(version)

    async def release(self, group_ids):
        self.released += group_ids

    async def told(self):
        return {"begun": self.begun, "left": self.left, "released": self.released}

    async def cancel(self, group_ids):
        self.left += sorted(group_ids)


@pytest.fixture(scope="module", autouse=True)
def _ray():
    ray.init(
        "local",
        num_cpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture
def worker():
    worker = WorkerHandle(ray.remote(Rank).remote(), 120.0)
    yield worker
    worker.kill()


async def groups_of(worker, tasks):
    return [summary.id async for summary, _ in worker.generate(tasks)]


async def told_once(worker, condition):
    """Return what the worker has done, once the condition holds of it."""
    deadline = time.monotonic() + LONG_S
    while not condition(told := await worker.call("told")):
        assert time.monotonic() < deadline, told
        await asyncio.sleep(0.05)
    return told


def task(name, row=1, fault=""):
    return Task(name, "train", row, (0,), fault=fault)


def test_heartbeat_and_weights_are_answered_beside_more_streams_than_an_actor_runs_calls(worker):
    async def run():
        streams = [asyncio.ensure_future(groups_of(worker, [task(f"g{i}")])) for i in range(N_OPEN)]
        await asyncio.wait_for(told_once(worker, lambda told: len(told["begun"]) == N_OPEN), LONG_S)
        asked = [worker.call("heartbeat"), worker.call("load_weights", [], 1)]
        assert await asyncio.wait_for(asyncio.gather(*asked), LONG_S) == [True, None]
        await worker.call("allow")
        assert await asyncio.wait_for(asyncio.gather(*streams), LONG_S) == [
            [f"g{i}"] for i in range(N_OPEN)
        ]

    asyncio.run(run())


def test_a_group_that_nobody_holds_is_freed_before_the_next_message(worker):
    async def run():
        async for _, stored in worker.generate([task("now stored")]):
            assert used_bytes() > STORED_BYTES
            del stored
        deadline = time.monotonic() + LONG_S
        while used_bytes() > STORED_BYTES:
            assert time.monotonic() < deadline, "the stream still holds the group"
            await asyncio.sleep(0.05)

    asyncio.run(run())


def test_groups_come_on_after_a_stream_has_carried_all_that_it_may(worker):
    async def run():
        for i in range(STREAM_MESSAGES + 10):
            assert await groups_of(worker, [task(f"now{i}")]) == [f"now{i}"]

    asyncio.run(run())


def test_the_error_of_a_batch_is_that_of_its_stream_and_no_others(worker):
    async def run():
        good = asyncio.ensure_future(groups_of(worker, [task("g")]))
        with pytest.raises(WorkerDied, match="the engine is gone"):
            await groups_of(worker, [task("now", 1, "the engine is gone")])
        with pytest.raises(KeyError, match="odd row"):
            await groups_of(worker, [task("now", 0, "odd row")])
        await worker.call("allow")
        assert await good == ["g"]

    asyncio.run(run())


def test_nothing_is_left_of_a_stream_that_its_consumer_leaves(worker):
    async def run():
        stream = asyncio.ensure_future(groups_of(worker, [task("a"), task("b")]))
        await told_once(worker, lambda told: told["begun"] == ["a", "b"])
        stream.cancel()
        await asyncio.wait([stream])
        assert not worker._batches
        await told_once(worker, lambda told: told["left"] == ["a", "b"])
        await worker.call("allow")  # they were as good as done
        told = await told_once(worker, lambda told: told["released"])
        assert sorted(told["released"]) == ["a", "b"]

    asyncio.run(run())


def test_all_streams_end_with_their_worker(worker):
    async def run():
        streams = [asyncio.ensure_future(groups_of(worker, [task(f"g{i}")])) for i in range(3)]
        await told_once(worker, lambda told: len(told["begun"]) == 3)
        worker.kill()
        ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), LONG_S)
        assert [type(error) for error in ended] == [WorkerDied] * 3
        with pytest.raises(WorkerDied):
            await groups_of(worker, [task("later")])

    asyncio.run(run())
