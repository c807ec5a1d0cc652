"""Training asks nothing of a GPU that it must wait for in each micro-batch: no number is read back, no boolean index is searched,
and what the host sends is queued. Seen on a CPU and on the meta device, by the operations that run."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import group, pixels, tiny_collator, tiny_policy, tiny_trainer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.loss import micro_batch_loss
from rlinf_vl.actor.terms import Passes
from rlinf_vl.algorithms import AGGREGATION_MODES, IMPORTANCE_LEVELS
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.models import attention, context
from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.kernels.attention import Matmul, Varlen
from rlinf_vl.models.kernels.delta import Mixer
from rlinf_vl.models.loading import freeze
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.packing.collator import Member
from rlinf_vl.packing.planner import Item

_aten = torch.ops.aten
_WAITS = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.equal,
}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Made(TorchFunctionMode):
    """Counts the tensors that are made on a device from numbers of the host: they are copied there, and that is waited for."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        if func in (torch.tensor, torch.as_tensor) and str(device or "cpu") != "cpu":
            self.counts[f"made on {device}"] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Counts, by name, the operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.made = Made(self.counts)

    def __enter__(self):
        self.made.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.made.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        boolean = func.overloadpacket in _INDEXED and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if func.overloadpacket in _WAITS or boolean:
            self.counts[str(func)] += 1
        target = kwargs.get("device")
        if func.overloadpacket is _aten._to_copy and target not in (None, args[0].device):
            self.counts[f"blocking copy to {target}"] += not kwargs.get("non_blocking")
        if (
            func.overloadpacket is _aten.copy_
            and args[0].device != args[1].device
            and not (args[2:] and args[2])
        ):
            self.counts["blocking copy_"] += 1
        return func(*args, **kwargs)


def algorithm_of(aggregation: str, level: str) -> AlgorithmConfig:
    return with_presets(AlgorithmConfig(
        loss_agg_func=aggregation, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, kl_beta=0.1,
        entropy_bonus=0.01, importance_sampling_level=level, recompute_logprobs="true",
    ))  # fmt: skip


def group_with_images(name: str):
    return group(np.random.default_rng(0), [(2, 3), (1, 1)], [4, 7, 2], name)


CASES = pytest.mark.parametrize(
    ("aggregation", "level"), list(zip(AGGREGATION_MODES, IMPORTANCE_LEVELS, strict=True))
)


@pytest.mark.slow
@CASES
def test_more_micro_batches_read_nothing_more_back(aggregation, level, mesh, monkeypatch):
    """A whole step on a CPU. What an optimizer step reads (its gradient's norm, the metrics) it reads once."""
    monkeypatch.setattr(attention, "kernel_for", lambda *_: Matmul)

    def waits(n: int) -> Counter:
        trainer = tiny_trainer(mesh, algorithm=algorithm_of(aggregation, level))
        groups = {g: group_with_images(f"g{g}") for g in range(n)}
        micro_batches = tuple(tuple(Item(g, i, 1, 1) for i in range(3)) for g in groups)
        mini = RankMiniBatch(micro_batches, (True,) * n, 13 * n)
        trainer.batches.prepare(groups.values())  # the tower reads its grids
        with Waits() as seen:
            sums, _ = trainer.update(groups, [mini], [((-1.0,), (0.0,), (1.0,))] * n, recorded={0})
            sums.state()
        return seen.counts

    one, four = waits(1), waits(4)
    assert one, "reading the metrics counts"
    assert four == one


@CASES
def test_a_micro_batch_on_a_device_is_queued(aggregation, level, monkeypatch):
    """Forward, loss and backward on meta tensors, by the kernels of CUDA: what comes from the host doesn't block."""
    monkeypatch.setattr(attention, "kernel_for", lambda *_: Varlen)
    policy = tiny_policy(temperature=0.7, chunk=6)
    freeze(policy.model, policy.family)
    policy = policy.to("meta").bfloat16()
    sums = MetricSums()
    for name in "ab":
        g = group_with_images(name)
        batch = tiny_collator()([Member(g, k, [k - 1.0]) for k in range(3)], run_vision=True)
        patches = torch.from_numpy(
            np.concatenate([pixels(image) for image, _ in g.images])[:7, :32]
        )
        features = VisionFeatures(patches.to("meta").bfloat16(), (patches.to("meta").bfloat16(),))
        with Waits() as seen:
            logprobs, entropy = policy(batch, features)
            before, algorithm = logprobs.detach(), algorithm_of(aggregation, level)
            loss, part = micro_batch_loss(
                logprobs, entropy, before, Passes(before), batch, algorithm, 13
            )
            loss.backward()
            sums.merge(part)
        assert not +seen.counts, dict(seen.counts)


@pytest.mark.parametrize("size", [2, 4])
def test_layers_of_context_parallel_copy_nothing_from_the_host(size, monkeypatch):
    """Attention and a delta net of ranks that share a row, on meta tensors: the exchange alone is pretended. What a layer must
    know of heads and channels was copied when the first one asked."""
    monkeypatch.setattr(attention, "kernel_for", lambda *_: Varlen)
    monkeypatch.setattr(context, "_exchange", lambda x, _: torch.empty_like(x))
    row = attention.SegmentAttention(
        np.array([0, 8, 24, 32]), np.array([-1, 0, -1]), device="meta", dtype=torch.bfloat16
    )
    shared_row = context.ContextAttention(row, context.ContextRanks(None, 0, size))
    mixer = Mixer(torch.zeros(64, 3, device="meta"), 4, 8, 4, 4)

    def run_layers(count: int) -> Counter:
        with Waits() as seen:
            for layer in range(count):
                q, k, v = (
                    torch.zeros(1, h, 32 // size, 8, device="meta", dtype=torch.bfloat16)
                    for h in (8, 2, 2)
                )
                qkv = torch.zeros(1, 32 // size, 64, device="meta")
                g = torch.zeros(1, 32 // size, 8, device="meta")
                assert shared_row.attend(layer, q, k, v, 1.0).shape == (1, 32 // size, 8, 8)
                shared_row.mix(layer, mixer, qkv, g, g)
        return +seen.counts

    context._kv_heads_on.cache_clear()
    context._channels.cache_clear()
    run_layers(1)
    assert not run_layers(3)


def test_a_wait_is_seen():
    x = torch.arange(4.0)
    with Waits() as seen:
        (
            x[x > 1],
            x.sum().item(),
            torch.zeros(2).to("meta"),
            torch.zeros(2).to("meta", non_blocking=True),
            torch.tensor([1, 2], device="meta"),
        )
    assert seen.counts["made on meta"] == 1
    assert sum(seen.counts.values()) >= 4 and "blocking copy to meta" in seen.counts
    assert seen.counts["blocking copy to meta"] == 1
