"""The memory ledger against real FSDP2 on one and two gloo ranks: bytes of parameters, gradients and optimizer are equal."""

import socket

import pytest
import torch
import torch.multiprocessing as mp
from tiny import banned, tiny_model

from rlinf_vl.config.load import parse_config


def measure(rank: int, ranks: int, options: dict, port: int, out) -> None:
    """One optimizer step of the tiny model; rank 0 tells the bytes that it holds behind backward."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from rlinf_vl.actor.fsdp import make_optimizer, micro_step, reshard_all, shard
    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.loading import freeze_vision, use_packed_attention
    from rlinf_vl.models.policy import PolicyModel
    from rlinf_vl.preflight.trace import _features, _row

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    family = family_of("qwen3_vl")
    model = use_packed_attention(tiny_model(), family)
    freeze_vision(model, family)
    policy = PolicyModel(model, family, banned() & False, temperature=1.0, chunk=64)
    shard(policy, init_device_mesh("cpu", (ranks,)), param_dtype="fp32", reduce_dtype="fp32", **options)
    optimizer = make_optimizer(policy, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    row = _row(40, 20, torch.arange(1, 20).numpy())
    during = {}
    for last in (False, True):
        micro_step(policy, last=last)
        logprobs, _ = policy(row, _features(model, family, 19, torch.device("cpu")))
        logprobs.sum().backward()
        if not last:
            during = {"unsharded gradients": unsharded(policy)}
    reshard_all(policy)
    optimizer.step()
    trained = [p for p in policy.parameters() if p.requires_grad]
    held = {
        "parameters": sum(local(p) for p in policy.parameters()),
        "gradients": sum(local(p.grad) for p in trained),
        "optimizer": sum(local(v) for s in optimizer.state.values() for v in s.values() if v.ndim),
    }
    if rank == 0:
        out.put(held | during)
    dist.barrier()
    dist.destroy_process_group()


def local(tensor) -> int:
    return tensor.to_local().nbytes


def unsharded(policy) -> int:
    """Bytes of whole gradients that FSDP2 keeps between micro-batches."""
    from torch.distributed.fsdp import FSDPModule

    found = 0
    for module in policy.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group else ():
            kept = parameter.unsharded_accumulated_grad
            if kept is None and hasattr(parameter, "_unsharded_param"):
                kept = parameter.unsharded_param.grad
            found += 0 if kept is None else kept.numel() * kept.element_size()
    return found


@pytest.mark.parametrize(("ranks", "reshard"), [(1, True), (2, True), (2, False)])
def test_a_ranks_bytes_are_the_ledgers(ranks, reshard, tmp_path):
    from rlinf_vl.preflight.ledger import Hardware, Model, ledger

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    out = context.Queue()
    options = {"reshard_after_forward": reshard, "gradient_checkpointing": True}
    processes = [context.Process(target=measure, args=(r, ranks, options, port, out)) for r in range(ranks)]
    for process in processes:
        process.start()
    held = out.get(timeout=300)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0

    tiny_model().config.save_pretrained(tmp_path)
    fsdp = "actor.fsdp_config"
    config = parse_config(
        "qwen3-vl-2b-grpo-fsdp-geo3k",
        [
            f"{fsdp}.reshard_after_forward={reshard}",
            f"{fsdp}.mixed_precision.param_dtype=fp32",
            "runner.max_tokens_per_mbs=512",
            "runner.seq_length=512",
        ],
    )
    said = ledger(config, Hardware.named(ranks, 80), Model(config, str(tmp_path))).gpus[0].phases["train"]
    for part in ("parameters", "optimizer"):
        assert held[part] == said[part], part
    if ranks == 1 or not reshard:  # kept whole through the micro-batches, and more than the shards that they end as
        assert held["unsharded gradients"] == said["gradients"] >= held["gradients"]
    else:
        assert held["unsharded gradients"] == 0 and held["gradients"] == said["gradients"]
