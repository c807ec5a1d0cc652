"""Parameters and optimizer state go to host memory and come back: training goes on as if they had stayed."""

import torch
from tiny import tiny_trainer
from torch.distributed.tensor import DTensor

from rlinf_vl.actor.offload import PARTS
from rlinf_vl.config.schema import ActorConfig, FsdpConfig, MixedPrecisionConfig, OptimConfig

ACTOR = ActorConfig(
    optim=OptimConfig(lr=0.1, adam_beta2=0.95, weight_decay=0.1),
    # A single rank on a CPU that reduces no gradients in another dtype shards nothing.
    fsdp_config=FsdpConfig(mixed_precision=MixedPrecisionConfig("fp32", "bf16")),
)


def trained(mesh, *offloads: tuple[str, ...]):
    """A trainer after three optimizer steps on made-up gradients, with these parts away between steps; and its weights."""
    trainer = tiny_trainer(mesh, actor=ACTOR)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in trainer.policy.parameters():
            if p.requires_grad:
                assert isinstance(p, DTensor)
                p.grad = torch.zeros_like(p)
                p.grad.to_local().copy_(torch.randn(p.to_local().shape, generator=generator))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        for parts in offloads:
            trainer.memory.release(parts)
        trainer.memory.restore()
    return trainer, dict(trainer.weights(torch.float32))


def test_training_goes_on_as_if_nothing_had_been_moved(mesh):
    _, expected = trained(mesh)
    _, found = trained(mesh, ("optimizer",), PARTS)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], value) for name, value in found.items())


def test_the_same_host_memory_is_used_every_time(mesh):
    trainer, _ = trained(mesh, PARTS)
    memory, policy, optimizer = trainer.memory, trainer.policy, trainer.optimizer
    parts = {id(p): p.to_local() for p in policy.parameters() if isinstance(p, DTensor)}
    states = [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, DTensor)
    ]
    assert {key for key in memory._host if isinstance(key, int)} >= parts.keys()
    assert len(memory._host) == len(parts) + len(states)
    held = {
        key: value.to_local().data_ptr()
        for key, value in memory._host.items()
        if isinstance(value, DTensor)
    }
    memory.release(PARTS)
    memory.release(PARTS)  # there already
    away = [p.to_local() for p in policy.parameters() if isinstance(p, DTensor)]
    assert {local.data_ptr() for local in away if local.numel()} <= set(held.values())
    assert {key: memory._host[key].to_local().data_ptr() for key in held} == held
