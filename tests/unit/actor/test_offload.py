"""Parameters and optimizer state go to host memory and come back: training goes on as if they had stayed."""

import pytest
import torch
import torch.distributed as dist
from tiny import banned, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlinf_vl.actor.fsdp import make_optimizer, shard, whole_weights
from rlinf_vl.actor.offload import PARTS, Offload
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import freeze_vision, use_packed_attention
from rlinf_vl.models.policy import PolicyModel

FAMILY = family_of("qwen3_vl")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(*offloads: tuple[str, ...]):
    """Weights after three optimizer steps on made-up gradients, with these parts away between steps; and the `Offload`."""
    model = use_packed_attention(tiny_model(), FAMILY)
    freeze_vision(model, FAMILY)
    policy = PolicyModel(model, FAMILY, banned(), temperature=1.0, chunk=None)
    shard(policy, init_device_mesh("cpu", (1,)), param_dtype="fp32", reduce_dtype="fp32")
    optimizer = make_optimizer(policy, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    memory = Offload(policy, optimizer, None, "cpu")
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in policy.parameters():
            if p.requires_grad:
                assert isinstance(p, DTensor)
                p.grad = torch.zeros_like(p)
                p.grad.to_local().copy_(torch.randn(p.to_local().shape, generator=generator))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for parts in offloads:
            memory.release(parts)
        memory.restore()
    return dict(whole_weights(policy, torch.float32)), memory, policy, optimizer


def test_training_goes_on_as_if_nothing_had_been_moved(group):
    expected, *_ = trained()
    found, *_ = trained(("optimizer",), PARTS)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], value) for name, value in found.items())


def test_the_same_host_memory_is_used_every_time(group):
    _, memory, policy, optimizer = trained(PARTS)
    parts = {id(p): p.to_local() for p in policy.parameters() if isinstance(p, DTensor)}
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, DTensor)]
    assert {key for key in memory._host if isinstance(key, int)} >= parts.keys()
    assert len(memory._host) == len(parts) + len(states)
    held = {key: value.to_local().data_ptr() for key, value in memory._host.items() if isinstance(value, DTensor)}
    memory.release(PARTS)
    memory.release(PARTS)  # there already
    away = [p.to_local() for p in policy.parameters() if isinstance(p, DTensor)]
    assert {local.data_ptr() for local in away if local.numel()} <= set(held.values())
    assert {key: memory._host[key].to_local().data_ptr() for key in held} == held
