"""How far an engine's logprobs are from the trainer's, by the number of images in a prompt."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from tiny import answered

from rlinf_vl.engines.base import Engine
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import Request

#: Most that prompts with several images may be further off than those with one.
MOST = 1.2


def differences(
    engine: Engine, requests: Sequence[Request], policy: PolicyModel, collate: Collator
) -> dict[int, np.ndarray]:
    """Images of a prompt → |rollout - train logprob| of every token sampled for such prompts. The trainer's are those of a packed
    row with the samples of one prompt."""
    found = defaultdict(list)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        group = answered(request, completion.samples)
        members = [Member(group, i, [0.0]) for i in range(len(completion.samples))]
        with torch.no_grad():
            logprobs, _ = policy(collate(members, run_vision=True))
        sampled = np.concatenate([sample.logprobs for sample in completion.samples])
        found[len(request.images)].append(np.abs(sampled - logprobs.numpy()))
    return {images: np.concatenate(off) for images, off in sorted(found.items())}


def ratio(off: dict[int, np.ndarray]) -> float:
    """The mean over tokens of prompts with several images, by that of prompts with one."""
    return float(
        np.concatenate([off[images] for images in off if images > 1]).mean() / off[1].mean()
    )
