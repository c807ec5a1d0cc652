"""Turns of a shared GPU: what sleeps, what is moved, and in which order; a lost rank leaves nobody asleep."""

import pytest

from rlinf_vl.config.engines import wakes_empty
from rlinf_vl.config.load import parse_config
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.engines.base import MEMORY_TAGS, release_tags


class Engines:
    """A pool of one engine, which refuses what it can't do in its state."""

    def __init__(self, log, tags=MEMORY_TAGS):
        self.log, self.tags, self.asleep = log, tags, set()

    def release_tags(self):
        return self.tags

    def release_memory(self, tags):
        self.log.append(("engines release", *tags))
        self.asleep |= set(tags)

    def restore_memory(self, tags):
        if self.asleep & set(tags):
            self.log.append(("engines restore", *tags))
        self.asleep -= set(tags)

    def sync(self):
        assert "weights" not in self.asleep
        self.log.append(("sync",))


class Ranks:
    def __init__(self, log):
        self.log, self.away = log, set()

    def release_memory(self, parts):
        self.log.append(("ranks release", *parts))
        self.away |= set(parts)

    def restore_memory(self):
        self.log.append(("ranks restore", *sorted(self.away)))
        self.away.clear()


def test_a_step_releases_trains_syncs_and_restores_in_order():
    log = []
    engines, ranks = Engines(log), Ranks(log)
    gpu = SharedGpu(engines, shared=True, offload=False)
    gpu.to_ranks(ranks)
    log.append(("train",))
    gpu.to_engines(ranks, engines.sync)
    assert log == [
        ("engines release", "weights", "kv_cache"),
        ("train",),
        ("ranks release",),
        ("engines restore", "weights"),
        ("sync",),
        ("ranks release",),
        ("engines restore", "kv_cache"),
    ]
    assert not engines.asleep


def test_parameters_leave_the_device_behind_the_sync():
    """A sync from host memory would gather through the slow process group, or copy everything once more."""
    log = []
    engines, ranks = Engines(log), Ranks(log)
    gpu = SharedGpu(engines, shared=True, offload=True)
    for sync in (engines.sync, None):
        gpu.to_ranks(ranks)
        assert not ranks.away and engines.asleep == {"weights", "kv_cache"}
        log.clear()
        gpu.to_engines(ranks, sync)
        assert ranks.away == {"optimizer", "weights"} and not engines.asleep
        order = [entry for entry in log if entry != ("sync",)]
        assert order == [
            ("ranks release", "optimizer"),
            ("engines restore", "weights"),
            ("ranks release", "optimizer", "weights"),
            ("engines restore", "kv_cache"),
        ]
        if sync:
            assert log.index(("sync",)) == 2


def test_small_weights_stay():
    log = []
    engines, ranks = Engines(log, tags=("kv_cache",)), Ranks(log)
    gpu = SharedGpu(engines, shared=True, offload=False)
    gpu.to_ranks(ranks)
    assert engines.asleep == {"kv_cache"}
    gpu.to_engines(ranks, engines.sync)
    assert not engines.asleep and ("engines restore", "weights") not in log


def test_ranks_that_die_in_training_leave_no_engine_asleep():
    """The restart goes through the same turns: the engines sleep while the new ranks load, then wake with their weights."""
    log = []
    engines, ranks = Engines(log), Ranks(log)
    gpu = SharedGpu(engines, shared=True, offload=True)
    gpu.to_ranks(ranks)
    fresh = Ranks(log)  # the old ones died
    gpu.to_ranks()
    assert engines.asleep == {"weights", "kv_cache"}
    gpu.to_engines(fresh, engines.sync)
    assert not engines.asleep and log[-1] == ("engines restore", "kv_cache")


def test_on_gpus_of_their_own_nothing_moves():
    log = []
    engines, ranks = Engines(log), Ranks(log)
    gpu = SharedGpu(engines, shared=False, offload=True)
    gpu.to_ranks(ranks)
    gpu.to_engines(ranks, None)
    gpu.to_engines(ranks, engines.sync)
    assert log == [("sync",)]


GIB = 2**30


@pytest.mark.parametrize(
    ("weights", "gpu", "tags"),
    [
        (4 * GIB, 80 * GIB, ("kv_cache",)),
        (4 * GIB, 24 * GIB, MEMORY_TAGS),
        (16 * GIB, 80 * GIB, MEMORY_TAGS),
    ],
)
def test_what_is_released_depends_on_the_size_of_the_weights(weights, gpu, tags):
    assert release_tags(weights, gpu) == tags


def test_engines_that_sleep_without_a_copy_are_never_woken_without_a_sync():
    log = []
    engines, ranks = Engines(log), Ranks(log)
    gpu = SharedGpu(engines, shared=True, offload=False, wakes_empty=True)
    assert gpu.loses_weights
    gpu.to_ranks(ranks)
    with pytest.raises(AssertionError, match="would wake without weights"):
        gpu.to_engines(ranks, None)
    gpu.to_engines(ranks, engines.sync)
    # Small weights stay on the GPU.
    assert not SharedGpu(
        Engines(log, ("kv_cache",)), shared=True, offload=False, wakes_empty=True
    ).loses_weights


@pytest.mark.parametrize(
    ("overrides", "empty"),
    [
        ([], False),  # auto is resolved when the placement is known
        (["rollout.weight_sync=shared_memory"], True),
        (["rollout.weight_sync=delta"], False),
        (["rollout.weight_sync=shared_memory", "actor.model.is_lora=true"], False),
        (["rollout.weight_sync=shared_memory", "runner.weight_sync_interval=2"], False),
        (["rollout.weight_sync=shared_memory", "rollout.rollout_backend=torch"], False),
    ],
)
def test_no_copy_is_kept_where_the_sync_brings_nearly_all_anyway(overrides, empty):
    config = parse_config(
        "qwen3-vl-2b-grpo-fsdp-geo3k", [*overrides, "runner.mismatch_check_interval=-1"]
    )
    assert wakes_empty(config) == empty
