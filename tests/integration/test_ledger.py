"""The memory ledger against real FSDP2 on one and two gloo ranks: bytes of parameters, gradients and optimizer are equal."""

import pytest
import torch
from tiny import tiny_model, tiny_trainer

from rlinf_vl.config.load import parse_config

FSDP = "actor.fsdp_config"


def measure(reshard: bool, lora: bool) -> dict[str, int]:
    """Bytes that a rank has after the backward of one optimizer step of the tiny model."""
    from rlinf_vl.actor.mesh import Mesh, reduce_in_backward, reshard_all
    from rlinf_vl.config.schema import (
        ActorConfig,
        ActorModelConfig,
        FsdpConfig,
        MixedPrecisionConfig,
    )
    from rlinf_vl.tools.memory.trace import _features, _row

    mesh = Mesh.make("cpu")
    fsdp = FsdpConfig(
        reshard_after_forward=reshard,
        mixed_precision=MixedPrecisionConfig("bf16" if lora else "fp32"),
    )
    trainer = tiny_trainer(
        mesh, actor=ActorConfig(model=ActorModelConfig(is_lora=lora), fsdp_config=fsdp)
    )
    policy = trainer.policy
    row = _row(40, 20, torch.arange(1, 20).numpy())
    during = {}
    for last in (False, True):
        reduce_in_backward(policy, last or not mesh.gathers_once(fsdp))
        logprobs, _ = policy(row, _features(policy.model, policy.family, 19, torch.device("cpu")))
        logprobs.sum().backward()
        if not last:
            during = {"unsharded gradients": unsharded(policy)}
    reshard_all(policy)
    trainer.optimizer.step()
    trained = [p for p in policy.parameters() if p.requires_grad]
    return during | {
        "parameters": sum(local(p) for p in policy.parameters()),
        "gradients": sum(local(p.grad) for p in trained),
        "optimizer": sum(
            local(v) for s in trainer.optimizer.state.values() for v in s.values() if v.ndim
        ),
    }


def local(tensor) -> int:
    return tensor.to_local().nbytes


def unsharded(policy) -> int:
    """Bytes of whole gradients that FSDP2 keeps between micro-batches."""
    from torch.distributed.fsdp import FSDPModule

    found = 0
    for module in policy.modules():
        group = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        for parameter in group.fsdp_params if group else ():
            kept = parameter.unsharded_accumulated_grad
            if kept is None and hasattr(parameter, "_unsharded_param"):
                kept = parameter.unsharded_param.grad
            found += 0 if kept is None else kept.numel() * kept.element_size()
    return found


@pytest.mark.sample("2-True-True")
@pytest.mark.parametrize(
    ("ranks", "reshard", "lora"),
    [(1, True, False), (2, True, False), (2, False, False), (1, True, True), (2, True, True)],
)
def test_a_ranks_bytes_are_the_ledgers(ranks, reshard, lora, processes, tmp_path):
    from rlinf_vl.tools.memory.ledger import Hardware, ledger
    from rlinf_vl.tools.memory.model import Model

    found, *_ = processes.run(ranks, measure, reshard, lora)
    tiny_model().config.save_pretrained(tmp_path)
    config = parse_config(
        "qwen3-vl-2b-grpo-fsdp-geo3k",
        [
            f"{FSDP}.reshard_after_forward={reshard}",
            f"{FSDP}.mixed_precision.param_dtype={'bf16' if lora else 'fp32'}",
            f"actor.model.is_lora={lora}",
            "runner.max_tokens_per_mbs=512",
            "runner.seq_length=512",
        ],
    )
    said = (
        ledger(config, Hardware.named(ranks, 80), Model(config, str(tmp_path)))
        .gpus[0]
        .phases["train"]
    )
    for part in ("parameters", "optimizer"):
        assert found[part] == said[part], part
    # Kept whole through the micro-batches, and more than the shards that they end as.
    if ranks == 1 or not reshard:
        assert found["unsharded gradients"] == said["gradients"] >= found["gradients"]
    else:
        assert found["unsharded gradients"] == 0 and found["gradients"] == said["gradients"]
