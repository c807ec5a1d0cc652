"""Groups from rollout workers to actor ranks through the object store: once, in place, and gone after the step."""

import time

import numpy as np
import psutil
import pytest
import ray

from rlinf_vl.config import load_config
from rlinf_vl.transport.groups import GroupStore, StoredImage, fetch
from rlinf_vl.types import (
    Group,
    ImageRef,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
)
from tests.object_store import used_bytes

pytestmark = pytest.mark.integration


@ray.remote(num_cpus=0)
class Worker:
    """As much of a rollout worker as the exchange needs. Groups g0, g1, …: `shown[i]` are the images of group i."""

    def __init__(self) -> None:
        self.store = GroupStore()

    def put(
        self, shown: list[list[int]], tokens: int = 50, size: int = 30_000, own_images: bool = False
    ) -> list[tuple[ray.ObjectRef, int]]:
        out = []
        for g, images in enumerate(shown):
            refs = tuple(ImageRef.of(bytes([i]) * size) for i in images)
            grids = np.ones((len(refs), 3), np.int32)
            request = Request(np.arange(20, dtype=np.int32), refs, grids, SamplingParams(), ())
            sample = Sample(
                np.full(tokens, g, np.int32),
                np.ones(tokens, np.float32),
                np.zeros(tokens, np.int32),
                "stop",
            )
            sequence = TokenSequence.of_sample(request, sample)
            group = Group(f"g{g}", "p", 20, (Trajectory((sequence,), (), 1.0, {}, "stop"),) * 4)
            out.append(self.store.put(group, own_images=own_images))
        return out

    def release(self, names: list[str]) -> int:
        self.store.release(names)
        return len(self.store._images)


@ray.remote(num_cpus=0)
def look(references) -> list:
    """On an actor rank: what each group holds, and where."""
    groups = fetch(references)
    data = {}
    for group in groups.values():
        for image, _ in group.images:
            assert image.data.readonly
            address = np.frombuffer(image.data, np.uint8).ctypes.data
            assert data.setdefault(image.hash, address) == address, "a second copy"
    return [
        (g, [i.data[0] for i, _ in group.images], int(group.sequences[3].ids[-1]))
        for g, group in groups.items()
    ]


@pytest.fixture
def cluster():
    from rlinf_vl.runtime.launch import ray_cluster

    with ray_cluster(load_config("toy-grpo-cpu", [])):
        yield


def assert_falls_to(limit: int, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while (used := used_bytes()) > limit:
        assert time.monotonic() < until, f"{used} bytes are still held"
        time.sleep(0.1)


def test_small_images_that_no_other_row_shows_travel_inside(cluster):
    worker = Worker.remote()
    stored = ray.get(worker.put.remote([[1], [2]], tokens=60, size=4000, own_images=True))
    unique = 4000 + 4 * (20 + 3) + 4 * 13 * 60
    assert all(size < 1.1 * unique for _, size in stored)
    groups = fetch({g: reference for g, (reference, _) in enumerate(stored)})
    assert [[bytes(i.data) for i, _ in group.images] for group in groups.values()] == [
        [bytes([i]) * 4000] for i in (1, 2)
    ]
    assert ray.get(worker.release.remote(["g0", "g1"])) == 0


def test_an_image_is_stored_once_and_goes_with_the_last_group_that_shows_it(cluster):
    worker = Worker.remote()
    before = used_bytes()
    stored = ray.get(worker.put.remote([[1], [1, 2], [2, 1], []]))
    references = {g: reference for g, (reference, _) in enumerate(stored)}
    assert ray.get(look.remote(references)) == [
        (0, [1], 0),
        (1, [1, 2], 1),
        (2, [2, 1], 2),
        (3, [], 3),
    ]
    image, group = 30_000, 4 * 20 + 4 * 13 * 50
    sizes = [size for _, size in stored]
    assert [size // image for size in sizes] == [1, 1, 0, 0]
    assert sum(sizes) < 1.1 * (2 * image + 4 * group)
    assert used_bytes() - before <= sum(sizes)

    lazily = ray.get(references[1])  # a reader that does not use `fetch` has the images too
    assert all(
        isinstance(i, StoredImage) and i.hash == ImageRef.of(bytes(i.data)).hash
        for i, _ in lazily.images
    )
    assert ray.get(worker.release.remote(["g0", "g1"])) == 2
    assert ray.get(look.remote({2: references[2]})) == [(2, [2, 1], 2)]
    del lazily, stored, references
    assert ray.get(worker.release.remote(["g2", "g3"])) == 0
    assert_falls_to(before)


def test_a_hundred_steps_leave_nothing_behind(tmp_path, monkeypatch):
    """The whole loop: the driver does not grow, and the object store ends as it began. Weights do not go through it here."""
    from rlinf_vl.controller.run_log import RunLog
    from rlinf_vl.driver.backends import parts_of
    from rlinf_vl.driver.supervise import supervise
    from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
    from rlinf_vl.observe.progress import RunProgress
    from rlinf_vl.rollout.pool.pool import RolloutPool
    from rlinf_vl.runtime.stop_request import StopRequest

    overrides = [
        "runner.max_steps=100",
        "runner.val_check_interval=-1",
        "cluster.component_placement={actor: 0, rollout: 0}",
        "rollout.weight_sync=shared_memory",
        "data.rollout_batch_size=2",
        "data.filter_prompt_by_length=false",
        "algorithm.group_size=2",
        "algorithm.sampling_params.max_new_tokens=4",
        f"runner.output_dir={tmp_path}",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    resident, metrics, at_start = [], [], []
    open_log, end_step, stop = RunLog.open, RunLog.end_step, RolloutPool.stop

    def opened(self, *arguments):
        at_start.append(used_bytes())
        open_log(self, *arguments)

    def watched(self, step, values):
        metrics.append(values)
        resident.append(psutil.Process().memory_info().rss)
        return end_step(self, step, values)

    def checked(self):
        assert_falls_to(at_start[0])
        stop(self)

    monkeypatch.setattr(RunLog, "open", opened)
    monkeypatch.setattr(RunLog, "end_step", watched)
    monkeypatch.setattr(RolloutPool, "stop", checked)
    model = str(toy_checkpoint_path())
    with parts_of(config, model, tmp_path, RunProgress(), StopRequest()) as parts:
        supervise(parts)
    assert len(metrics) == 100
    assert resident[-1] - resident[19] < 4 * 2**20
    assert all(m["data/object_store_bytes"] >= m["data/unique_bytes"] > 0 for m in metrics)
