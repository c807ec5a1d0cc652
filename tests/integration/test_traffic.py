"""Bytes of collectives, counted inside torch.distributed while ranks train, against the closed forms of the ledger."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from tiny import IMAGE_TOKENS, tiny_config, tiny_family, tiny_policy, tiny_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlinf_vl.preflight import model as models
from rlinf_vl.preflight.model import Weights, meta_model
from rlinf_vl.preflight.traffic import Grid, context_exchanges, expert_exchanges, weight_exchanges

KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}


class CountedCollectives(TorchDispatchMode):
    """Sums calls and bytes of collectives, by kind: of their larger tensor, and of what an all-to-all sends."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name
        if name.startswith("c10d::"):
            kind = KINDS[name.removeprefix("c10d::")]
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.calls[kind] += 1
            # A rank may get more rows for its experts, or fewer, than it sends.
            sent = tensors[1] if kind == "all-to-all" else max(tensors, key=lambda x: x.nbytes)
            self.nbytes[kind] += sent.nbytes
        return operation(*args, **(kwargs or {}))


def counted(
    model_type: str, context: int, shard: int | None, experts: int, checkpointing: bool
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Calls and bytes of the second micro-batch of a rank: its training, and a forward alone."""
    from rlinf_vl.actor import mesh as meshes
    from rlinf_vl.actor.mesh import Mesh, reduce_in_backward, reshard_all
    from rlinf_vl.config.schema import ActorConfig, FsdpConfig, MixedPrecisionConfig
    from rlinf_vl.packing.parts import row_part
    from rlinf_vl.preflight.trace import _row

    fsdp = FsdpConfig(
        reshard_after_forward=True,
        gradient_checkpointing="full" if checkpointing else "none",
        mixed_precision=MixedPrecisionConfig("bf16", "fp32"),
    )
    with mock.patch.object(meshes, "ONE_UNIT", 0):
        mesh = Mesh.make("cpu", context=context, shard=shard, experts=experts)
        trainer = tiny_trainer(
            mesh,
            lambda dtype: tiny_policy(dtype, model_type=model_type),
            actor=ActorConfig(fsdp_config=fsdp),
        )
    policy = trainer.policy
    row = _row(64, 32, np.arange(0))
    if mesh.context_ranks:
        row = row_part(row, mesh.context_ranks.rank, context, IMAGE_TOKENS)
    result = []
    for with_backward in (True, False):
        for _ in range(2):
            reduce_in_backward(policy, True)
            with CountedCollectives() as seen, torch.set_grad_enabled(with_backward):
                logprobs, entropy = policy(row)
                if with_backward:
                    (logprobs.sum() + entropy.sum()).backward()
        reshard_all(policy)
        result.append({kind: (seen.calls[kind], seen.nbytes[kind]) for kind in seen.calls})
    return tuple(result)


def closed_forms(
    model_type: str, grid: Grid, checkpointing: bool
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """What `counted` counts, by the ledger's closed forms."""
    family, config = tiny_family(model_type), tiny_config(model_type)
    with mock.patch.object(models, "ONE_UNIT", 0):
        meta = meta_model(
            config,
            family,
            torch.bfloat16,
            frozen=("vision_tower", "projector"),
            router=False,
        )
        weights = Weights(meta, family)
    text = config.get_text_config()
    result = []
    for passes, gathers, root in ((3 if checkpointing else 2, 2, 1), (1, 1, 0)):
        exchanges = [
            *weight_exchanges(
                weights,
                grid,
                parts=("text", "root"),
                param_bytes=2,
                reduce_bytes=4,
                gathers=gathers,
                root_gathers=root,
                reduces=passes > 1,
            ),
            *context_exchanges(
                grid,
                tokens=64 // grid.context,
                layers=2,
                heads=4,
                kv_heads=2,
                head_dim=text.head_dim,
                itemsize=2,
                passes=passes,
            ),
            *expert_exchanges(
                grid,
                family.mixture(config),
                tokens=64 // grid.context,
                hidden=text.hidden_size,
                itemsize=2,
                passes=passes,
            ),
        ]
        totals = {}
        for exchange in exchanges:
            calls, nbytes = totals.get(exchange.kind, (0, 0))
            totals[exchange.kind] = (calls + exchange.calls, nbytes + exchange.nbytes)
        result.append(totals)
    return result[0], result[1]


#: model type; ranks, those that share rows, weights, experts; checkpointing
LAYOUTS = [
    ("qwen3_vl_moe", 8, 1, None, 4, True),
    ("qwen3_vl_moe", 8, 2, None, 1, False),
    ("qwen3_vl_moe", 8, 2, 4, 2, True),
    ("qwen3_vl", 8, 1, 4, 1, True),
]


@pytest.mark.parametrize(
    ("model_type", "ranks", "context", "shard", "experts", "checkpointing"), LAYOUTS
)
def test_counted_bytes_are_the_closed_forms(
    model_type, ranks, context, shard, experts, checkpointing, processes
):
    results = processes.run(ranks, counted, model_type, context, shard, experts, checkpointing)
    grid = Grid(ranks, shard or ranks, context, experts)
    expected = closed_forms(model_type, grid, checkpointing)
    if context > 1:  # a logprob and an entropy of each token, and a logprob alone, in float32
        for totals, columns in zip(expected, (2, 1), strict=True):
            calls, nbytes = totals.get("all-reduce", (0, 0))
            totals["all-reduce"] = (calls + 1, nbytes + 64 * columns * 4)
    for number, totals in enumerate(expected):
        counts = [result[number] for result in results]
        # A rank with busy experts sends more rows home than others; all together send what they get.
        sent = [rank.pop("all-to-all", (0, 0)) for rank in counts]
        assert tuple(sum(column) / ranks for column in zip(*sent, strict=True)) == totals.pop(
            "all-to-all", (0, 0)
        )
        assert counts == [totals] * ranks
