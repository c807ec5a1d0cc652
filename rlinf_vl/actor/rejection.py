"""Which tokens of a micro-batch `algorithm.rejection` leaves in the loss, and what there was before it rejected any."""

import torch

from rlinf_vl.algorithms import log_ratios, rejection_mask
from rlinf_vl.algorithms.aggregation import segment_sums
from rlinf_vl.config.schema.algorithm import RejectionConfig
from rlinf_vl.observe.metrics import MetricSums


def reject(
    train: torch.Tensor,
    rollout: torch.Tensor | None,
    mask: torch.Tensor,
    rejection: RejectionConfig,
    *,
    segment_ids: torch.Tensor,
    n_segments: int,
) -> tuple[torch.Tensor, MetricSums]:
    """Tokens that stay, bool [R], and metrics over all tokens or sequences: the range of their ratios, the shares that go.

    Args:
        train, rollout: float32 [R], logprobs of the trainer's weights, and of those that sampled each token.
        mask: bool [R].
    """
    sums, level, veto = MetricSums(), rejection.level, rejection.veto
    if level is None and veto is None:
        return mask, sums
    assert rollout is not None, "validation asks for rollout.return_logprobs"
    segments = {"segment_ids": segment_ids, "n_segments": n_segments}
    vetoed = ~rejection_mask(train, rollout, mask, level=None, veto=veto, **segments)
    kept = ~vetoed
    if level is not None:
        assert rejection.low is not None and rejection.high is not None, "filled by config/presets.py"
        bounds = {"low": rejection.low, "high": rejection.high}
        kept = kept & rejection_mask(train, rollout, mask, level=level, **bounds, **segments)
    if not len(mask):
        return kept, sums
    _, rejected, tokens = segment_sums((~kept).float(), mask, segment_ids, n_segments)
    sequences = (tokens > 0).sum()
    sums.add("actor/rejected_tokens", (~kept).sum(), len(mask))
    sums.add("actor/rejected_sequences", (rejected > 0).sum(), sequences)
    if veto is not None:
        _, stopped, _ = segment_sums(vetoed.float(), mask, segment_ids, n_segments)
        sums.add("actor/vetoed_sequences", (stopped > 0).sum(), sequences)
    ratios = log_ratios(train, rollout, mask, level or "token", **segments).exp()
    sums.minimum("actor/rejection_ratio_min", ratios.min())
    sums.maximum("actor/rejection_ratio_max", ratios.max())
    return kept, sums
