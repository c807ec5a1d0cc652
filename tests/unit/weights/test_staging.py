"""Weights that pass through two buckets of memory: how much that is, what readers get, and who is waited for. Real processes."""

import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from rlinf_vl.weights import sender as sender_module
from rlinf_vl.weights import shared_memory
from rlinf_vl.weights import staging as room
from rlinf_vl.weights.buckets import Label, WeightsDiffer, group_by_size
from rlinf_vl.weights.shard import local_part
from rlinf_vl.weights.staging import Staging

BUCKET = 4096
N_BUCKETS = 12


def weights_of(sync: int) -> list[tuple[str, torch.Tensor]]:
    """Weights of `N_BUCKETS` buckets; the values tell sync and weight."""
    return [(f"w{i}", torch.full((BUCKET // 8,), 100.0 * sync + i)) for i in range(2 * N_BUCKETS)]


def read(pipe: Connection, slow_s: float = 0.0, fail_at: int = -1, timeout: float = 60.0) -> None:
    """A reader's process: for each list of labels, copies the weights and sends (name → value, or the error)."""
    room.TIMEOUT = timeout
    while (labels := pipe.recv()) is not None:
        try:
            copied = {}
            stream = shared_memory.opened(labels)
            for number, bucket in enumerate(stream):
                pipe.send(("bucket", number))
                time.sleep(slow_s)
                if number == fail_at:
                    stream.close()
                    raise ValueError("does not fit")
                copied |= {name: float(value.unique()) for name, value in bucket.items()}
            pipe.send(("all", copied))
        except (ValueError, TimeoutError, WeightsDiffer) as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


@pytest.fixture
def reader():
    """Start readers: (process, pipe). They end with the test."""
    started = []

    def start(**how):
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(target=read, args=(theirs,), kwargs=how)
        process.start()
        started.append(process)
        return process, ours

    yield start
    for process in started:
        process.kill()
        process.join()


def buckets_of(sync: int):
    return list(group_by_size(weights_of(sync), BUCKET))


def answer(pipe: Connection) -> tuple[str, object]:
    """The reader's last word on a sync."""
    while (kind := pipe.recv())[0] == "bucket":
        pass
    return kind


def test_a_sync_stages_two_buckets_and_every_reader_gets_all_weights(reader):
    readers = [reader(), reader(slow_s=0.01)]
    staging = Staging("cpu")
    total = sum(value.nbytes for _, value in weights_of(0))
    for sync in (1, 2):
        buckets = buckets_of(sync)
        assert len(buckets) == N_BUCKETS
        labels = staging.announce([Label.of(bucket, check=True) for bucket in buckets], "here")
        for _, pipe in readers:
            pipe.send(labels)
        pids = {process.pid for process, _ in readers}
        staged = []
        for bucket in buckets:
            staging.fill(bucket, pids)
            staged.append(staging.staged_bytes)
        staging.finish(pids)
        assert max(staged) == 2 * BUCKET < total / 5
        expected = {name: float(value[0]) for name, value in weights_of(sync)}
        assert [answer(pipe) for _, pipe in readers] == [("all", expected)] * 2
        assert len(pids) == 2
        staging.release()
        assert staging.staged_bytes == 0


def test_a_reader_that_is_new_is_not_waited_for_with_what_came_before(reader):
    staging, readers = Staging("cpu"), []
    for sync in (1, 2):
        readers.append(reader())
        labels = staging.announce([Label.of(bucket) for bucket in buckets_of(sync)], "here")
        for _, pipe in readers:
            pipe.send(labels)
        pids = {process.pid for process, _ in readers}
        for bucket in buckets_of(sync):
            staging.fill(bucket, pids)
        staging.finish(pids)
        assert pids == {process.pid for process, _ in readers}
        for _, pipe in readers:
            kind, copied = answer(pipe)
            assert kind == "all" and copied["w0"] == 100 * sync
        staging.release()


def test_a_bucket_is_not_overwritten_before_the_slowest_has_copied_it(reader):
    process, pipe = reader(slow_s=0.05)
    staging = Staging("cpu")
    buckets = buckets_of(1)
    pipe.send(staging.announce([Label.of(bucket) for bucket in buckets], "here"))
    pids = {process.pid}
    for number, bucket in enumerate(buckets):
        staging.fill(bucket, pids)
        read_so_far = staging._board.number_at(8 * process.pid)
        assert number + 1 - read_so_far <= 2
    staging.finish(pids)
    assert answer(pipe)[0] == "all"


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_who_dies_or_fails_on_the_way_is_not_waited_for(reader, how):
    process, pipe = reader(slow_s=0.01, fail_at=3 if how == "failed" else -1)
    other, other_pipe = reader()
    staging = Staging("cpu")
    buckets = buckets_of(1)
    labels = staging.announce([Label.of(bucket) for bucket in buckets], "here")
    pids = {process.pid, other.pid}
    pipe.send(labels)
    other_pipe.send(labels)
    for number, bucket in enumerate(buckets):
        staging.fill(bucket, pids)
        if number == 4 and how == "killed":
            os.kill(process.pid, signal.SIGKILL)  # a zombie until it is joined
    staging.finish(pids)
    assert answer(other_pipe)[0] == "all"
    if how == "failed":
        assert answer(pipe) == ("error", "ValueError: does not fit")
    else:
        assert pids == {other.pid}


def test_who_hangs_is_left_behind_and_finds_its_weights_gone(reader, monkeypatch):
    monkeypatch.setattr(room, "TIMEOUT", 0.5)
    process, pipe = reader(slow_s=0.02)
    staging = Staging("cpu")
    buckets = buckets_of(1)
    pids = {process.pid}
    pipe.send(staging.announce([Label.of(bucket) for bucket in buckets], "here"))
    staging.fill(buckets[0], pids)
    assert pipe.recv() == ("bucket", 0)
    os.kill(process.pid, signal.SIGSTOP)
    for bucket in buckets[1:]:
        staging.fill(bucket, pids)
    assert pids == set()
    os.kill(process.pid, signal.SIGCONT)
    kind, said = answer(pipe)
    assert kind == "error" and "weights were overwritten" in said


def test_a_reader_does_not_wait_for_ever(reader):
    _, pipe = reader(timeout=0.2)
    staging = Staging("cpu")
    pipe.send(staging.announce([Label.of(bucket) for bucket in buckets_of(1)], "here"))
    kind, said = answer(pipe)
    assert kind == "error" and "did not come" in said


def test_ranks_send_through_two_buckets_and_keep_their_part_of_a_snapshot(
    reader, monkeypatch, tmp_path
):
    """The sender alone; Ray's answers are given, and its store is a list."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        monkeypatch.setattr(shared_memory, "places_of", lambda device, n: ("here",))
        monkeypatch.setattr(shared_memory.ray, "get", lambda answer, timeout: answer)
        sync = 1
        parts = lambda: [local_part(name, value) for name, value in weights_of(sync)]  # noqa: E731
        sender = shared_memory.SharedMemorySender(
            lambda device: weights_of(sync), parts, 0, 1, "cpu", BUCKET
        )
        monkeypatch.setattr(sender_module, "put", lambda value: value)
        process, pipe = reader()
        for sync in (1, 2):
            offer = sender.offer(version=sync, check=sync == 1)
            assert sender._staging.staged_bytes == 2 * BUCKET
            pipe.send(offer.labels)
            sender.deliver([(("here",), process.pid), (("elsewhere",), 1)])
            expected = {name: float(value[0]) for name, value in weights_of(sync)}
            assert answer(pipe) == ("all", expected)
            sender.release()
            assert sender._staging.staged_bytes == 0
            snapshot = sender.snapshot()
            assert snapshot.version == sync and len(snapshot.buckets) > 1
            kept = {
                name: patch.masked("cpu")
                for bucket in snapshot.read(snapshot.buckets, "cpu")
                for name, patch in bucket.items()
            }
            assert all(torch.equal(kept[name], value) for name, value in weights_of(sync))
            assert sender.copy.nbytes == sum(value.nbytes for _, value in weights_of(sync))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: true", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_ALLOC_CONF", "", False),
    ],
)
def test_expandable_segments_are_off_while_memory_for_others_is_allocated(
    monkeypatch, name, value, off
):
    for other in room.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    changes = []
    monkeypatch.setattr(room, "_set_allocator", changes.append)
    with pytest.raises(MemoryError), room.expandable_segments_off():
        assert changes == ["expandable_segments:False"] * off
        raise MemoryError
    assert changes == ["expandable_segments:False", "expandable_segments:True"] * off
