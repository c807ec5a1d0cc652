"""Expert parallelism on real FSDP2 ranks over gloo: a training step is that of the plain reference however ranks share out experts
and tokens, and the bytes that travel and that a rank holds are those of closed forms."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from plain_step import Layout, groups_of, plain_reference
from tiny import IMAGE_ID, tiny_policy, tiny_trainer
from torch.distributed.tensor import DTensor
from trained_step import assert_same, trained_step

from rlinf_vl.types import GroupSummary

pytestmark = pytest.mark.integration

#: `qwen3_vl_moe` has a dense layer before its mixture, `qwen3_5_moe` shared experts and delta nets.
PLAIN = Layout(family="qwen3_vl_moe", train_tower=False)
SHARED = replace(PLAIN, family="qwen3_5_moe")
REPLAY, REPLAY_SHARED = replace(PLAIN, replay=True), replace(SHARED, replay=True)
ADAPTERS = {"lora": "language", "kl_beta": 0.1}
ONE_EXPERT = {"text": {"num_experts_per_tok": 1}}
TWO, FOUR = {"ranks": 2, "experts": 2}, {"ranks": 4, "experts": 4}

#: Most pairs of {expert ranks, data ranks, context ranks, kind of groups, adapters, replay, mini-batches, balance, resharding,
#: family, routes, checkpointing, copies of the weights}.
LAYOUTS = {
    "2": (replace(REPLAY, **TWO), "mixed"),
    "2, shared expert, trees": (replace(SHARED, **TWO, budget=150, checkpointing="full"), "turns in sequences"),
    "2, balance, mini-batches": (replace(PLAIN, **TWO, balance=0.3, minibatches=2, budget=80, reshard=False), "mixed"),
    "2, context": (replace(REPLAY_SHARED, **TWO, context=2, balance=0.3, checkpointing="full", reentrant=True), "mixed"),
    "2, adapters": (replace(REPLAY, **TWO, **ADAPTERS, budget=90, checkpointing="full"), "mixed"),
    "2, adapters, shared expert": (replace(SHARED, **TWO, **ADAPTERS, one_unit=True, reshard=False), "turns in sequences"),
    "2, one unit, text": (replace(SHARED, **TWO, one_unit=True, minibatches=2), "text"),
    "2, tower, one image": (replace(REPLAY, **TWO, train_tower=True, size=3), "one image"),
    "2, padded, repeated prompts": (replace(SHARED, **TWO, budget=120, pad=True, share=False, balance=0.3), "mixed"),
    "2, reference, errors": (replace(REPLAY, **TWO, kl_beta=0.1, budget=90, reshard=False), "errors and gaps"),
    "2, teacher": (replace(PLAIN, **TWO, teacher=(0.7, 0.5, 0), budget=90), "mixed"),
    "2 of 4": (replace(SHARED, ranks=4, experts=2, budget=90, balance=0.3, checkpointing="full"), "mixed"),
    "2 of 4, copies": (replace(REPLAY, ranks=4, experts=2, shard=2, minibatches=2, reshard=False), "one image"),
    "2 of 4, context 4": (replace(PLAIN, ranks=4, experts=2, context=4, budget=150), "turns in sequences"),
    "2 of 4, context 2, adapters": (replace(REPLAY_SHARED, ranks=4, experts=2, context=2, **ADAPTERS), "mixed"),
    "2 of 4, copies, adapters": (replace(REPLAY, ranks=4, experts=2, shard=2, **ADAPTERS, budget=90), "mixed"),
    "2 of 4, context 2, copies": (replace(SHARED, ranks=4, experts=2, shard=2, context=2, balance=0.3), "turns in sequences"),
    "2 of 4, context 2, tower": (
        replace(REPLAY, ranks=4, experts=2, context=2, train_tower=True, minibatches=2, checkpointing="full"), "mixed"
    ),
    "4": (replace(REPLAY, **FOUR, budget=90, checkpointing="selective"), "mixed"),
    "4, tower, trees": (replace(PLAIN, **FOUR, train_tower=True, budget=150, reshard=False), "turns in sequences"),
    "4, ranks without tokens": (replace(SHARED, **FOUR, minibatches=4, balance=0.3), "mixed"),
    "4, context 2": (replace(PLAIN, **FOUR, context=2, balance=0.3, minibatches=2, checkpointing="full"), "turns in sequences"),
    "4, context 4": (replace(REPLAY_SHARED, **FOUR, context=4, reshard=False), "one image"),
    "4, adapters, ranks without tokens": (replace(REPLAY, **FOUR, **ADAPTERS, minibatches=4), "mixed"),
    "4, ranks without rows": (replace(REPLAY, **FOUR, routes=(1, 2), budget=90), "mixed"),
    "4, all to one expert": (replace(REPLAY, **FOUR, routes=(5,), sizes=ONE_EXPERT, minibatches=2, reshard=False), "mixed"),
    "4, context 2, all to one expert, adapters": (
        replace(REPLAY_SHARED, **FOUR, context=2, routes=(5,), sizes=ONE_EXPERT, **ADAPTERS, minibatches=2), "mixed"
    ),
    "4, all to one, adapters": (replace(REPLAY_SHARED, **FOUR, routes=(1, 0), **ADAPTERS, checkpointing="full"), "mixed"),
}  # fmt: skip


@pytest.mark.sample("2, context", "4, ranks without tokens", "4, all to one expert")
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_changes_no_step(name, processes):
    layout, kind = LAYOUTS[name]
    ours = trained_step(processes, layout, kind)
    assert_same(ours, plain_reference(layout, kind))
    if layout.routes:
        assert ours[0]["actor/expert_load"] > 0.6 * 8 / len(layout.routes), "few experts are busy"


def counted_step(experts: int, checkpointing: str):
    """One step of a rank: bytes sent to other ranks for the rows of experts, bytes of all-gathers, bytes of experts held, tokens of
    its rows, forwards of them."""
    from rlinf_vl.actor import mesh as meshes
    from rlinf_vl.config.schema import ActorConfig, FsdpConfig, MixedPrecisionConfig
    from rlinf_vl.controller.step_plan import plan_step

    meshes.ONE_UNIT = 0
    mesh = meshes.Mesh.make("cpu", experts=experts)
    actor = ActorConfig(
        fsdp_config=FsdpConfig(
            gradient_checkpointing=checkpointing, mixed_precision=MixedPrecisionConfig("fp32")
        )
    )
    trainer = tiny_trainer(
        mesh, lambda dtype: tiny_policy(dtype, model_type="qwen3_vl_moe"), actor=actor
    )
    held = sum(
        p.to_local().nbytes
        for name, p in trainer.policy.named_parameters()
        if ".experts." in name and isinstance(p, DTensor)
    )
    groups = groups_of("text")
    plan = plan_step(
        [GroupSummary.of(group, IMAGE_ID) for group in groups],
        trainer.algorithm,
        ranks=dist.get_world_size(),
        budget=400,
        micro_batch_size=None,
        share_prompts=True,
    )
    mine = [ranks[mesh.data_rank] for ranks in plan.minibatches]
    numbers = {item.group for mini in mine for items in mini.micro_batches for item in items}
    sent, gathered, tokens = [], [], []
    # FSDP2 calls the first from torch 2.13 on.
    gather_name = "all_gather_single"
    if not hasattr(dist, gather_name):
        gather_name = "all_gather_into_tensor"
    exchange, gather = dist.all_to_all_single, getattr(dist, gather_name)
    forward = trainer.policy.forward

    def counted_exchange(out, rows, *sizes, **options):
        sent.append(rows.nbytes)
        return exchange(out, rows, *sizes, **options)

    def counted_gather(output_tensor, *arguments, **options):
        gathered.append(output_tensor.nbytes)
        return gather(output_tensor, *arguments, **options)

    def counted_forward(batch, *arguments, **options):
        tokens.append(len(batch.ids))
        return forward(batch, *arguments, **options)

    dist.all_to_all_single = counted_exchange
    setattr(dist, gather_name, counted_gather)
    trainer.policy.forward = counted_forward
    try:
        trainer.update({n: groups[n] for n in numbers}, mine, plan.advantages)
    finally:
        dist.all_to_all_single = exchange
        setattr(dist, gather_name, gather)
    return sum(sent), max(gathered, default=0), held, sum(tokens), len(tokens)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_travels_and_what_a_rank_holds(processes, checkpointing):
    """A token's row goes to each of its experts and comes back, and so do gradients; a layer gathers no experts of other ranks."""
    experts, k, hidden, inner, mixtures = 8, 2, 32, 16, 1
    stacked = 4 * experts * 3 * hidden * inner  # bytes of a layer's experts
    for size in (2, 4):
        results = processes.run(4, counted_step, size, checkpointing)
        passes = 3 if checkpointing == "full" else 2  # forward, once more, and backward
        sent, gathered, held, tokens, forwards = zip(*results, strict=True)
        row_bytes = 2 * 4 * k * hidden * mixtures  # there and back, in float32
        count_bytes = 8 * experts * (passes - 1) * sum(forwards)
        assert sum(sent) == sum(tokens) * row_bytes * passes + count_bytes
        assert set(held) == {stacked / 4}
        # The largest gathered at once is the root's, or a layer's with a rank's own experts.
        assert max(gathered) < stacked
        if size == 4:
            whole = processes.run(4, counted_step, 1, checkpointing)
            assert all(gathered > stacked for _, gathered, *_ in whole), "the measure sees them"
