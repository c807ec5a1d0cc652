"""Drawing tokens: temperature, top-k, top-p, and a random stream for each sample.

Sample i of a request draws its token t with the t-th number of a counter-based stream keyed by its
seed, so the result does not depend on the worker, on the other rows of the batch, or on earlier
requests.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlinf_vl.types import SamplingParams


def uniforms(seed: int, n: int) -> np.ndarray:
    """Return the random stream of one sample: float32 [n] in [0, 1) (Philox; Salmon et al.
    2011)."""
    return np.random.Generator(np.random.Philox(key=seed)).random(n, dtype=np.float32)


class Sampler:
    """The sampling parameters of a batch of rows as tensors, and the draw itself."""

    def __init__(self, params: Sequence[SamplingParams], banned: torch.Tensor) -> None:
        """`params`: one per row; `banned`: bool [V], never sampled."""
        device = banned.device
        self.banned = banned
        self.temperature = torch.tensor([p.temperature for p in params], device=device)
        self.top_p = torch.tensor([p.top_p for p in params], device=device)
        self.top_k = torch.tensor([p.top_k or len(banned) for p in params], device=device)
        self.greedy = self.temperature == 0
        self.any_greedy = bool(self.greedy.any())
        self.truncates = any(p.top_p < 1 or p.top_k > 0 for p in params)
        self.divides = any(p.temperature not in (0.0, 1.0) for p in params)

    def __call__(self, logits: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row by inverting the cumulative distribution.

        Args:
            logits: float32 [S, V]; overwritten.
            u: float32 [S] in [0, 1).

        Returns:
            (ids int64 [S], logprobs float32 [S]). Logprobs are those of the tempered distribution
            without the banned ids, as the trainer scores them and SGLang reports them: top-k and
            top-p choose which ids can be drawn, but don't renormalise the logprobs. For greedy rows
            they are those of the untempered distribution.
        """
        logits.masked_fill_(self.banned, -torch.inf)
        if self.divides:
            logits.div_(torch.where(self.greedy, 1.0, self.temperature)[:, None])
        logp = torch.log_softmax(logits, dim=-1)
        p = logp.exp()
        if self.truncates:
            p.masked_fill_(self._cut_off(p), 0.0)
        ids = self.choose(p, u)
        if self.any_greedy:
            ids = torch.where(self.greedy, logp.argmax(-1), ids)
        return ids, logp.gather(1, ids[:, None]).squeeze(1)

    def choose(self, p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Return the ids, int64 [S], that the random numbers u [S] draw from p [S, V]."""
        return _invert(p, u)

    def _cut_off(self, p: torch.Tensor) -> torch.Tensor:
        """Return the mask, bool [S, V], of the ids that top-k and top-p leave out."""
        ordered, index = p.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(-1) - ordered  # of the more likely ids
        drop = (mass_before >= self.top_p[:, None]) | (
            torch.arange(p.shape[1], device=p.device) >= self.top_k[:, None]
        )
        drop[:, 0] = False  # the most likely id always stays, whatever top-p
        return torch.zeros_like(drop).scatter(1, index, drop)


def _invert(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the id, int64 [S], at which the cumulative sum of p [S, V] (of any total) passes u [S]
    · total.

    Its p is above 0. On CUDA a cumulative sum need not be monotone, nor constant where zeros are
    added, and u · total can round up to the total itself. An id without probability that is hit by
    such a rounding is replaced by the last id with probability before it, or else the first one.
    """
    cdf = p.cumsum(-1)
    ids = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).clamp_(max=p.shape[1] - 1)
    astray = (p.gather(1, ids) <= 0).squeeze(1)
    if astray.any():
        all_ids = torch.arange(p.shape[1], device=p.device)
        possible = p[astray] > 0
        last_before = torch.where(possible & (all_ids <= ids[astray]), all_ids, -1).amax(
            -1, keepdim=True
        )
        first_possible = possible.byte().argmax(-1, keepdim=True)
        ids[astray] = torch.where(last_before >= 0, last_before, first_possible)
    return ids.squeeze(1)
