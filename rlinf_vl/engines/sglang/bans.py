"""Bans ids in SGLang's schedulers: one index for all requests.

A bias of SGLang's own has a row of float32 over the vocabulary for each request. It is built from
Python lists when a request comes, gathered and joined again when a batch changes, and added in
every step: 156 MB for 256 requests of 151,936 ids.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import functools
import os
from typing import Any

import numpy as np
import torch

#: The environment variable with the ids that are never sampled: "3-4 7-9" is 3, 7 and 8.
VARIABLE = "RLINF_VL_BANNED_IDS"
#: The logit of banned ids: its exp is exactly 0. SGLang's logprobs leave such ids out, too.
BAN = -1e9


def as_text(banned: np.ndarray) -> str:
    """Return the value of `VARIABLE` for a mask, bool [V]."""
    edges = np.flatnonzero(np.diff(banned.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return " ".join(f"{first}-{end}" for first, end in edges.tolist())


def from_text(text: str) -> list[int]:
    """Return the ids of `as_text`."""
    runs = [map(int, run.split("-")) for run in text.split()]
    return [token_id for first, end in runs for token_id in range(first, end)]


def ban_in_sampling(sampling_batch: Any) -> None:
    """Let SGLang's class of a sampling batch ban the ids of `VARIABLE` in this process."""
    ids = from_text(os.environ.get(VARIABLE, ""))
    apply = sampling_batch.apply_logits_bias

    @functools.cache
    def index_on(device: torch.device) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=device)

    @functools.wraps(apply)
    def apply_with_bans(self: Any, logits: torch.Tensor) -> None:
        apply(self, logits)
        logits.index_fill_(-1, index_on(logits.device), BAN)

    sampling_batch.apply_logits_bias = apply_with_bans
