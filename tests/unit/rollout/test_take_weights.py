"""The receiving side of a sync: what arrives is compared with what was sent, and so is what the engine then holds."""

import asyncio

import pytest
import torch

from rlinf_vl.engines.base import EngineDied
from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.weights.buckets import WeightsDiffer, fingerprint, pack
from rlinf_vl.weights.object_store import ObjectStoreStrategy
from rlinf_vl.weights.sender import Offer


class Holder:
    """As much of an engine as a sync touches. `loses`: a weight that it does not take."""

    reads_labels = False

    def __init__(self, loses=None, tells=True):
        self.loses, self.tells, self.weights = loses, tells, {}

    def load_weights(self, buckets, version):
        for bucket in buckets:
            for name, value in bucket.items():
                self.weights[name] = (
                    torch.zeros_like(value) if name == self.loses else value.clone()
                )
        self.version = version

    def fingerprint(self, names):
        return fingerprint(self.weights[name] for name in names) if self.tells else None


def take(engine, weights, check=True, device="cpu"):
    rank = object.__new__(RolloutRank)
    rank.engine, rank.device = engine, device

    async def run():
        labels = []
        for bucket in pack(weights.items(), 40, check=check):
            labels.append(asyncio.get_running_loop().create_future())
            labels[-1].set_result(bucket)
        offer = asyncio.get_running_loop().create_future()
        offer.set_result(Offer(labels))
        assert await rank.take_weights(ObjectStoreStrategy(), [offer], 5) >= 0

    asyncio.run(run())


WEIGHTS = {name: torch.randn(4) for name in "abcdef"}


def test_all_buckets_are_taken():
    engine = Holder()
    take(engine, WEIGHTS)
    assert engine.version == 5
    assert all(torch.equal(engine.weights[name], value) for name, value in WEIGHTS.items())


def test_an_engine_that_does_not_hold_what_it_got_is_found_on_the_first_sync():
    with pytest.raises(WeightsDiffer, match="c … d .2 of them. in the engine"):
        take(Holder(loses="d"), WEIGHTS)
    take(Holder(loses="d"), WEIGHTS, check=False)  # later ones carry no fingerprints
    take(Holder(loses="d", tells=False), WEIGHTS)  # SGLang can't say


def test_memory_of_the_gpu_is_given_back_once_all_is_copied(monkeypatch):
    calls = []
    for name in ("synchronize", "ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    take(Holder(), WEIGHTS, device="cuda")
    assert calls == ["synchronize", "ipc_collect", "empty_cache"]


def test_an_engine_that_gets_no_memory_counts_as_dead():
    """So that its worker is replaced, and the run goes on."""

    class Full:
        def restore_memory(self, tags):
            raise torch.OutOfMemoryError(f"no memory for {tags}")

    rank = object.__new__(RolloutRank)
    rank.engine = Full()
    with pytest.raises(EngineDied, match="not restored: no memory for .'kv_cache'"):
        asyncio.run(rank.restore_memory(("kv_cache",)))
