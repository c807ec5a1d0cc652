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

from rlinf_vl.actor import expert_sharding
from rlinf_vl.actor import mesh as meshes
from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.config.schema import ActorConfig, FsdpConfig
from rlinf_vl.errors import RunError
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


@pytest.fixture
def rank_5_of_8() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def layout(mesh) -> tuple[tuple[str, ...], list]:
    return mesh.mesh_dim_names, mesh.mesh.tolist()


def test_how_ranks_are_arranged(rank_5_of_8):
    mesh = Mesh.make("cpu", context=2, shard=4, experts=2)
    assert layout(mesh.ranks) == (("data", "context"), [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert layout(mesh.sharding) == (("replicate", "shard"), [[0, 1, 2, 3], [4, 5, 6, 7]])
    names, ranks = ("replicate", "expert_shard", "expert"), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert mesh.experts is not None and layout(mesh.experts) == (names, ranks)
    names, ranks = ("replicate", "expert", "expert_shard"), [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    assert layout(expert_sharding.reading_order(mesh.experts)) == (names, ranks)
    experts, context = expert_sharding.expert_ranks(mesh.experts), mesh.context_ranks
    assert (experts.rank, experts.size) == (1, 2)
    assert context is not None and (context.rank, context.size) == (1, 2)
    assert (mesh.size, mesh.data_rank, mesh.reports, mesh.shards_weights) == (8, 2, False, True)
    alone = Mesh.make("cpu", experts=4)
    assert layout(alone.ranks) == (("data", "context"), [[rank] for rank in range(8)])
    assert layout(alone.sharding) == (("shard",), list(range(8)))
    assert alone.experts is not None
    assert layout(alone.experts) == (("expert_shard", "expert"), [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert (alone.context_ranks, alone.data_rank, alone.reports) == (None, 5, True)
    whole = Mesh.make("cpu", shard=1)
    assert (whole.experts, whole.shards_weights) == (None, False)


def test_what_ranks_do_with_gradients(rank_5_of_8):
    mesh = Mesh.make("cpu")
    assert not mesh.gathers_once(FsdpConfig(reshard_after_forward=True))
    assert mesh.gathers_once(FsdpConfig(reshard_after_forward=False))
    used, unused = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    used.grad = torch.arange(8.0, 14.0).view(2, 3)
    mesh.average_gradients([])
    mesh.average_gradients([used, unused])  # a rank that does not exist adds nothing
    assert torch.equal(used.grad, torch.arange(8.0, 14.0).view(2, 3) / 8)
    assert unused.grad is not None and torch.equal(unused.grad, torch.zeros(4))


def test_a_rank_keeps_its_experts(rank_5_of_8):
    experts = Mesh.make("cpu", experts=4).experts
    policy, other = (tiny_policy(model_type="qwen3_5_moe") for _ in range(2))
    assert expert_sharding.can_share(policy, experts)
    expert_sharding.check_policy(policy, experts)
    expert_sharding.share_out(policy, policy, experts)
    n_shared = 0
    for (name, weight), whole in zip(policy.named_parameters(), other.parameters(), strict=True):
        if isinstance(weight, DTensor):
            n_shared += 1
            assert torch.equal(weight.to_local(), whole[2:4]), name
            assert weight.shape == whole.shape and weight.requires_grad == whole.requires_grad
    assert n_shared
    dense = tiny_policy()
    assert not expert_sharding.can_share(dense, experts)
    with pytest.raises(RunError, match="a qwen3_vl has no mixture of experts"):
        expert_sharding.check_policy(dense, experts)
    uneven = tiny_policy(model_type="qwen3_5_moe", text={"num_experts": 6})
    with pytest.raises(RunError, match="4 does not divide the 6 experts of this qwen3_5_moe"):
        expert_sharding.check_policy(uneven, experts)
