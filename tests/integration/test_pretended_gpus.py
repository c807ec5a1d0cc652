"""Reservation on Ray with pretended GPUs: who sees which, and the ledger settles `rollout.gpu_memory_utilization: auto`."""

import os

import pytest
import ray

from rlinf_vl.config.load import parse_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.launch import reserve
from rlinf_vl.runtime.ray_process import gpu_ids, see_gpus
from rlinf_vl.tools.memory import automatic
from rlinf_vl.tools.memory.ledger import Hardware, ledger
from rlinf_vl.tools.memory.model import Model

FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
GIB = 2**30


@pytest.fixture(scope="module", autouse=True)
def eight_gpus():
    ray.init(
        address="local", num_cpus=16, num_gpus=8, include_dashboard=False, logging_level="error"
    )
    yield
    ray.shutdown()


def settled(monkeypatch, size: int, *overrides: str):
    """The config behind `settle_memory`, on 8 GPUs of so many bytes."""
    monkeypatch.setattr(automatic, "_gpu_bytes", lambda: size)
    config = parse_config(FLAGSHIP, overrides)
    with reserve(config) as placement:
        automatic.settle_memory(config, config.rollout.model.model_path, placement)
    return config


def test_auto_is_what_the_ledger_leaves(monkeypatch):
    size = int(79.1 * GIB)
    config = settled(monkeypatch, size)
    fresh = parse_config(FLAGSHIP)
    assert (
        config.rollout.gpu_memory_utilization
        == ledger(fresh, Hardware(8, size), Model(fresh)).share
        > 0.8
    )
    split = settled(monkeypatch, size, "cluster.component_placement={actor: 0-5, rollout: 6-7}")
    assert split.rollout.gpu_memory_utilization == 0.85


def test_auto_without_room_is_refused_and_a_number_is_the_users(monkeypatch, caplog):
    with pytest.raises(ConfigError, match=r"GiB on a GPU \(collocated\)"):
        settled(monkeypatch, 10 * GIB)
    config = settled(monkeypatch, 10 * GIB, "rollout.gpu_memory_utilization=0.5")
    assert config.rollout.gpu_memory_utilization == 0.5
    assert "memory: " in caplog.text and "GiB on a GPU" in caplog.text


@ray.remote
class Member:
    """A process of a run: the GPUs that it sees, in order."""

    def __init__(self, *further):
        see_gpus([gpu for gpus in further for gpu in gpus])

    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")


def test_an_engine_sees_the_gpus_of_the_ranks_on_its_slots():
    """Each rank has half a GPU of its own, and an engine the GPUs of all its slots, in their order:
    an engine is beside two ranks, one beside one, and one beside none."""
    overrides = [
        "cluster.component_placement={actor: 1-3, rollout: 1-6}",
        "rollout.tensor_parallel_size=2",
    ]
    with reserve(parse_config(FLAGSHIP, overrides)) as reservation:
        ranks = [Member.options(**options).remote() for options in reservation.actor]
        engines = [
            Member.options(**worker.options).remote(
                *(gpu_ids.options(**options).remote() for options in worker.further_slots)
            )
            for worker in reservation.rollout
        ]
        of_slot = dict(
            zip(
                reservation.placement.actor,
                (gpu for (gpu,) in ray.get([rank.gpus.remote() for rank in ranks])),
                strict=True,
            )
        )
        assert len(set(of_slot.values())) == len(of_slot)
        seen = ray.get([engine.gpus.remote() for engine in engines])
        for slots, gpus in zip(reservation.placement.engines, seen, strict=True):
            assert len(gpus) == len(set(gpus)) == 2
            for slot, gpu in zip(slots, gpus, strict=True):
                assert of_slot.setdefault(slot, gpu) == gpu
        assert len(set(of_slot.values())) == len(of_slot), "two slots have one GPU"
        for actor in (*ranks, *engines):
            ray.kill(actor)
