"""All sampled tokens of a mini-batch, for losses that choose some of them
(`LossInputs.minibatch`).

They are gathered from all ranks before the first micro-batch, so what a loss chooses does not
depend on how trajectories are packed.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.algorithms.losses import MiniBatchTokens
from rlinf_vl.types import MicroBatch


def minibatch_tokens(
    batches: Sequence[MicroBatch], start_logprobs: Sequence[torch.Tensor], mesh: Mesh
) -> MiniBatchTokens:
    """Return the tokens of all ranks in one mini-batch, on the rank's device. Collective.

    Args:
        batches: this rank's micro-batches, with or without pixels.
        start_logprobs: by micro-batch, float32 [R], of the weights before the step.
    """
    rows: list[np.ndarray] = [np.zeros((3, 0), np.float32)]
    for batch, logprobs in zip(batches, start_logprobs, strict=True):
        start = logprobs.float().cpu().numpy()
        sampled = start if batch.rollout_logprobs is None else batch.rollout_logprobs
        rows.append(np.stack([batch.advantages, start, sampled]))
    parts: list[np.ndarray] = [rows[0]] * dist.get_world_size()
    # Ranks that share trajectories have the same tokens; one of them gives them.
    dist.all_gather_object(parts, np.concatenate(rows if mesh.reports else rows[:1], axis=1))
    table = torch.from_numpy(np.concatenate(parts, axis=1)).to(mesh.device)
    return MiniBatchTokens(*table)
