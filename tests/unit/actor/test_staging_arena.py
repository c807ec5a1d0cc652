"""Checkpoints are staged in whole pages, locked once. CUDA is a stand-in that refuses what the driver refuses: a page twice."""

import logging
import mmap

import pytest
import torch
from ray.exceptions import RayTaskError
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from rlinf_vl.actor import staging_arena
from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.actor.staging_arena import ArenaStager

ALREADY_REGISTERED = 712


class Driver:
    """Page-locks memory; `status`: what it answers instead, if not 0."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.status = 0
        self.calls: list[tuple[int, int]] = []

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        self.calls.append((pointer, nbytes))
        pages = set(range(pointer // mmap.PAGESIZE, -(-(pointer + nbytes) // mmap.PAGESIZE)))
        if self.status or pages & self.pages:
            return self.status or ALREADY_REGISTERED
        self.pages |= pages
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        return 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(staging_arena, "BLOCK_BYTES", 8 * mmap.PAGESIZE)
    return made


def state(value: float) -> dict:
    """Many small tensors, some large ones, two views of one storage, an empty one, and no tensors."""
    shared = torch.full((6, 50), value)
    small = {f"norm{i}": torch.full((3 + i,), value + i) for i in range(200)}
    large = {f"weight{i}": torch.full((100, 97), value - i, dtype=torch.bfloat16) for i in range(3)}
    other = {
        "rows": shared[2:4],
        "all": shared,
        "none": torch.zeros(0, 4),
        "step": torch.tensor(value),
    }
    return {"model": small | large, "optimizer": {"state": other, "param_groups": [{"lr": 0.5}]}}


def same(ours, theirs) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_torchs_own_stager_locks_pages_twice(driver):
    with pytest.raises(RuntimeError, match="Registering memory failed"):
        StateDictStager(pin_memory=True).stage(state(1.0))


def test_pages_are_locked_once_and_every_checkpoint_has_the_same_memory(driver):
    stager = ArenaStager(page_locked=True)
    source = state(1.0)
    staged = stager.stage(source, non_blocking=True)
    assert same(staged, source)
    assert len(driver.calls) > 1 and all(
        p % mmap.PAGESIZE == n % mmap.PAGESIZE == 0 for p, n in driver.calls
    )
    assert sum(n for _, n in driver.calls) == mmap.PAGESIZE * len(driver.pages), (
        "nothing was refused"
    )
    source["model"]["norm3"].zero_()
    assert staged["model"]["norm3"].unique() == 4.0, "a copy"
    where = {name: value.data_ptr() for name, value in staged["model"].items()}
    calls = len(driver.calls)
    again = stager.stage(state(2.0), non_blocking=True)
    assert same(again, state(2.0)) and len(driver.calls) == calls
    assert {name: value.data_ptr() for name, value in again["model"].items()} == where
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in again["model"].values()), (
        "DCP would write more"
    )


def test_memory_that_can_not_be_locked_is_used_as_it_is(driver, caplog):
    driver.status = 2
    with caplog.at_level(logging.WARNING):
        assert same(ArenaStager(page_locked=True).stage(state(1.0), non_blocking=True), state(1.0))
    assert "can't be page-locked" in caplog.text


def test_state_that_a_rank_could_not_stage_is_a_checkpoint_that_failed(monkeypatch):
    """Which the run outlives (tests/unit/controller/test_saver.py)."""

    def call(group, method):
        raise RayTaskError("trainer.stage", "", MemoryError("no host memory"))

    monkeypatch.setattr(ActorGroup, "call", call)
    with pytest.raises(OSError, match="MemoryError: no host memory"):
        ActorGroup.stage(object.__new__(ActorGroup))
