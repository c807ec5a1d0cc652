"""Mean importance weights of a mini-batch, or of each of its groups
(`algorithm.importance_sampling_normalize`).

They are exact over all micro-batches and ranks, and known before the first micro-batch, since the
weights compare the engine with the weights before the step.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.loss import engine_weights, segments_of
from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.algorithms import weight_totals
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.types import MicroBatch

#: Least mean that weights are divided by: below it, none of them says anything.
MIN_MEAN = 1e-8


def weight_means(
    batches: Sequence[MicroBatch],
    mini: RankMiniBatch,
    start_logprobs: Sequence[torch.Tensor],
    algorithm: AlgorithmConfig,
    mesh: Mesh,
) -> dict[int, float]:
    """Return the mean weight by which those of each group are divided. Collective.

    With `batch` it is the mean over the mini-batch, with `group` that over the group: over tokens
    where these have weights of their own, else over sequences.

    Args:
        batches: this rank's micro-batches of `mini`, with or without pixels.
        start_logprobs: by micro-batch, float32 [R], of the weights before the step.
    """
    by_groups = algorithm.importance_sampling_normalize == "group"
    by_group: dict[int, list[float]] = {}
    # The part of a row that a rank computes has all that is needed of the whole row.
    for batch, items, logprobs in zip(batches, mini.micro_batches, start_logprobs, strict=True):
        weights = engine_weights(batch, logprobs, algorithm)
        assert weights is not None, "validation asks for importance_sampling_fix"
        totals, counts = weight_totals(
            weights,
            torch.ones_like(weights, dtype=torch.bool),
            level=algorithm.importance_sampling_level,
            owners=torch.from_numpy(batch.trajectories).to(weights.device),
            n_owners=len(items),
            **segments_of(batch, algorithm, weights.device),
        )
        for item, total, count in zip(items, totals.tolist(), counts.tolist(), strict=True):
            sums = by_group.setdefault(item.group, [0.0, 0.0])
            sums[0] += total
            sums[1] += count
    parts: list[dict[int, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, by_group if mesh.reports else {})
    merged: dict[int, list[float]] = {}
    for part in parts:
        for group, (total, count) in part.items():
            sums = merged.setdefault(group if by_groups else 0, [0.0, 0.0])
            sums[0] += total
            sums[1] += count
    means = {key: total / max(1.0, count) for key, (total, count) in merged.items()}
    means = {key: mean if mean > MIN_MEAN else 1.0 for key, mean in means.items()}
    return {group: means[group if by_groups else 0] for group in by_group}
