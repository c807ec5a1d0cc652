"""A rank never has the whole model on its device: FSDP2 moves one unit at a time.

There is no GPU here. The meta device stands in for one, in FSDP2 and in the rank, and the bytes of all storages that live on it are
counted operation by operation. So this shows what is moved when, not what CUDA's allocator makes of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_policy, tiny_trainer
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_init as fsdp2_init
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlinf_vl.actor import mesh as meshes
from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.config.schema import ActorConfig
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.family import submodules

RANKS = 4


class BytesOnDevice(TorchDispatchMode):
    """Counts the bytes of living storages on the meta device; `peak` is the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, DTensor):
                storage = value.untyped_storage()
                self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.living = {key: entry for key, entry in self.living.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.living.values()))
        return out


@dataclass(frozen=True, slots=True)
class MetaMesh(Mesh):
    """The mesh of a rank whose device is meta."""

    @property
    def device(self) -> str:
        return "meta"


def move_states(
    params: list[nn.Parameter], buffers: list[torch.Tensor], device: torch.device
) -> None:
    """Move a unit as FSDP2 does. It sets `.data`, which torch allows from the CPU to CUDA and not to meta: tensors are swapped."""
    for tensor in (*params, *buffers):
        if tensor.device != device:
            moved = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


@pytest.fixture
def mesh(monkeypatch) -> Iterator[Mesh]:
    """The mesh of one of four ranks, none of which exists, with large models' units."""
    monkeypatch.setattr(meshes, "ONE_UNIT", 0)
    monkeypatch.setattr(fsdp2, "_get_device_from_mesh", lambda _: torch.device("meta"))
    monkeypatch.setattr(fsdp2_init, "_move_states_to_device", move_states)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    made = Mesh.make("cpu")
    yield MetaMesh(made.ranks, made.sharding)
    dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_never_has_the_whole_model(mesh, family):
    deep = {"text": {"num_hidden_layers": 8, "vocab_size": 64}}
    model = tiny_policy(model_type=family, **deep)
    whole = sum(p.nbytes for p in model.parameters())
    units = [u for path in model.family.fsdp_units for u in submodules(model.model, path)]
    sizes = [sum(p.nbytes for p in unit.parameters()) for unit in units]
    in_units = {id(p) for unit in units for p in unit.parameters()}
    root = sum(p.nbytes for p in model.parameters() if id(p) not in in_units)
    actor = ActorConfig()
    actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    with BytesOnDevice() as on_device:
        trainer = tiny_trainer(mesh, lambda dtype: model, actor=actor)
    parameters = list(trainer.policy.parameters())
    assert {
        p.to_local().device.type if isinstance(p, DTensor) else p.device.type for p in parameters
    } == {"meta"}
    assert {buffer.device.type for buffer in trainer.policy.buffers()} == {"meta"}
    shards = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in parameters)
    small = 64 * len(parameters) + sum(buffer.nbytes for buffer in trainer.policy.buffers())
    assert shards < on_device.peak <= shards + max(*sizes, root) + small
    assert on_device.peak < 0.7 * whole
