"""Reject tokens whose trainer and rollout logprobs differ too much (`algorithm.rejection`).

The metrics describe all tokens, those rejected included.
"""

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
    """Return the mask of tokens that stay in the loss, bool [R], and metrics.

    The metrics are over all tokens or sequences: the range of their ratios, the shares rejected.

    Args:
        train, rollout: float32 [R], logprobs of the trainer's weights, and of those that sampled
            each token.
        mask: bool [R].
    """
    sums, level, veto = MetricSums(), rejection.level, rejection.veto
    if level is None and veto is None:
        return mask, sums
    assert rollout is not None, "validation asks for rollout.return_logprobs"
    segments = {"segment_ids": segment_ids, "n_segments": n_segments}
    # A veto of one token rejects its whole sequence, at whatever level the bounds apply.
    vetoed = ~rejection_mask(train, rollout, mask, level=None, veto=veto, **segments)
    accepted = ~vetoed
    if level is not None:
        assert rejection.low is not None and rejection.high is not None, (
            "filled by config/presets.py"
        )
        bounds = {"low": rejection.low, "high": rejection.high}
        accepted = accepted & rejection_mask(
            train, rollout, mask, level=level, **bounds, **segments
        )
    if not len(mask):
        return accepted, sums
    _, rejected_counts, token_counts = segment_sums(
        (~accepted).float(), mask, segment_ids, n_segments
    )
    n_sequences = (token_counts > 0).sum()
    sums.add("actor/rejected_tokens", (~accepted).sum(), len(mask))
    sums.add("actor/rejected_sequences", (rejected_counts > 0).sum(), n_sequences)
    if veto is not None:
        _, vetoed_counts, _ = segment_sums(vetoed.float(), mask, segment_ids, n_segments)
        sums.add("actor/vetoed_sequences", (vetoed_counts > 0).sum(), n_sequences)
    ratios = log_ratios(train, rollout, mask, level or "token", **segments).exp()
    sums.minimum("actor/rejection_ratio_min", ratios.min())
    sums.maximum("actor/rejection_ratio_max", ratios.max())
    return accepted, sums
