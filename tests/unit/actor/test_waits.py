"""Training asks nothing of a GPU that it must wait for in each micro-batch: no number is read back, no boolean index is searched,
and what the host sends is queued. Seen on a CPU and on the meta device, by the operations that run."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import IMAGE_ID, MERGE, PAD, banned, group, pixels, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vl.actor.fsdp import make_optimizer, make_scheduler
from rlinf_vl.actor.update import LossSettings, MiniBatch, micro_batch_loss, update
from rlinf_vl.algorithms import AGGREGATION_MODES, IMPORTANCE_LEVELS
from rlinf_vl.models import attention
from rlinf_vl.models.families import VisionFeatures, family_of
from rlinf_vl.models.kernels.attention import Matmul, Varlen
from rlinf_vl.models.loading import freeze_vision, use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.packing.collator import Collator, Member

FAMILY = family_of("qwen3_vl")
_aten = torch.ops.aten
_WAITS = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim, _aten.equal}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Waits(TorchDispatchMode):
    """Counts, by name, the operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        boolean = func.overloadpacket in _INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func.overloadpacket in _WAITS or boolean:
            self.counts[str(func)] += 1
        target = kwargs.get("device")
        if func.overloadpacket is _aten._to_copy and target not in (None, args[0].device):
            self.counts[f"blocking copy to {target}"] += not kwargs.get("non_blocking")
        if func.overloadpacket is _aten.copy_ and args[0].device != args[1].device and not (args[2:] and args[2]):
            self.counts["blocking copy_"] += 1
        return func(*args, **kwargs)


class Policy(PolicyModel):
    """Not sharded."""

    keeps_gathered = False


def policy_of(device: str = "cpu") -> Policy:
    model = use_packed_attention(tiny_model(), FAMILY)
    freeze_vision(model, FAMILY)
    return Policy(model, FAMILY, banned(), temperature=0.7, chunk=6).to(device)


def settings_of(aggregation: str, level: str) -> LossSettings:
    return LossSettings(
        aggregation=aggregation, clip_low=0.2, clip_high=0.28, clip_c=3.0, kl_beta=0.1, kl_estimator="k3",
        entropy_bonus=0.01, tis_clip=2.0, tis_level=level, old_logprobs="true",
    )  # fmt: skip


def micro_batches(n: int):
    """n micro-batches of a group with images, with features in the place of pixels."""
    rng = np.random.default_rng(0)
    collate = Collator(FAMILY, IMAGE_ID, MERGE, None, PAD)
    for i in range(n):
        g = group(rng, [(2, 3), (1, 1)], [4, 7, 2], name=f"g{i}")
        features = torch.from_numpy(np.concatenate([pixels(image) for image, _ in g.images])[:7, :32])
        yield (
            collate([Member(g, k, k - 1.0) for k in range(3)], run_vision=False),
            VisionFeatures(features, (features,)),
        )


CASES = pytest.mark.parametrize(("aggregation", "level"), list(zip(AGGREGATION_MODES, IMPORTANCE_LEVELS, strict=True)))


@CASES
def test_more_micro_batches_read_nothing_more_back(aggregation, level, monkeypatch):
    """The whole update on a CPU. What an optimizer step reads (its gradient's norm, the metrics) it reads once."""
    monkeypatch.setattr(attention, "kernel_for", lambda *_: Matmul)

    def waits(n: int) -> Counter:
        policy, reference = policy_of(), policy_of().requires_grad_(False)
        optimizer = make_optimizer(policy, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        scheduler = make_scheduler(optimizer, "constant", warmup=0, total=1, min_ratio=1.0)
        batches = list(micro_batches(n))
        with Waits() as seen:
            update(
                policy, reference, optimizer, scheduler, [MiniBatch(lambda: batches, n, 13 * n)],
                settings_of(aggregation, level), world_size=1, max_grad_norm=1.0, on_logprobs=lambda *_: None,
            ).state()  # fmt: skip
        return seen.counts

    one, four = waits(1), waits(4)
    assert one, "reading the metrics counts"
    assert four == one


@CASES
def test_a_micro_batch_on_a_device_is_queued(aggregation, level, monkeypatch):
    """Forward, loss and backward on meta tensors, by the kernels of CUDA: what comes from the host doesn't block."""
    monkeypatch.setattr(attention, "kernel_for", lambda *_: Varlen)
    policy = policy_of("meta").bfloat16()
    sums = MetricSums()
    for batch, features in micro_batches(2):
        features = VisionFeatures(features.tokens.to("meta").bfloat16(), (features.tokens.to("meta").bfloat16(),))
        with Waits() as seen:
            logprobs, entropy = policy(batch, features)
            loss, part = micro_batch_loss(
                logprobs, entropy, batch, settings_of(aggregation, level), 13,
                old_logprobs=logprobs.detach(), ref_logprobs=logprobs.detach(),
            )  # fmt: skip
            loss.backward()
            sums.merge(part)
        assert not +seen.counts, dict(seen.counts)


def test_a_wait_is_seen():
    x = torch.arange(4.0)
    with Waits() as seen:
        x[x > 1], x.sum().item(), torch.zeros(2).to("meta"), torch.zeros(2).to("meta", non_blocking=True)
    assert sum(seen.counts.values()) >= 3 and "blocking copy to meta" in seen.counts
    assert seen.counts["blocking copy to meta"] == 1
