"""Drawing tokens: temperature, top-k, top-p, and a random stream of each sample's own.

Sample i of a request draws its token t with the t-th number of a counter-based stream keyed by its seed, so what is
sampled does not depend on which worker runs it, what else is in the batch, or what ran before.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlinf_vl.types import SamplingParams


def uniforms(seed: int, n: int) -> np.ndarray:
    """float32 [n] in [0, 1): the stream of one sample (Philox; Salmon et al. 2011)."""
    return np.random.Generator(np.random.Philox(key=seed)).random(n, dtype=np.float32)


class Sampler:
    """Sampling parameters of a batch of rows as tensors, and the draw itself."""

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
            (ids int64 [S], logprobs float32 [S]); a logprob is that of the distribution drawn from (after temperature,
            top-k and top-p), for greedy rows that of the untempered one.
        """
        logits.masked_fill_(self.banned, -torch.inf)
        if self.divides:
            logits.div_(torch.where(self.greedy, 1.0, self.temperature)[:, None])
        if self.truncates:
            logits = self._truncate(logits)
        logp = torch.log_softmax(logits, dim=-1)
        cdf = logp.exp().cumsum(-1)
        ids = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1)
        # u · total can round up to the total itself: nothing lies beyond it
        best = logp.argmax(-1)
        ids = torch.where(ids >= logits.shape[1], best, ids)
        if self.any_greedy:
            ids = torch.where(self.greedy, best, ids)
        return ids, logp.gather(1, ids[:, None]).squeeze(1)

    def _truncate(self, logits: torch.Tensor) -> torch.Tensor:
        ordered, index = logits.sort(dim=-1, descending=True)
        p = torch.softmax(ordered, dim=-1)
        before = p.cumsum(-1) - p  # mass of the more likely ones; the first is always kept
        drop = (before >= self.top_p[:, None]) | (torch.arange(p.shape[1], device=p.device) >= self.top_k[:, None])
        drop[:, 0] = False
        drop[self.greedy] = False
        return logits.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), -torch.inf)
