"""Reduction of per-token losses to one scalar, and sums over the sequences of a packed tensor.

A loss is a sum over micro-batches and ranks, divided by a count that is global and known
beforehand. A mean of micro-batch means would weigh a sequence by how it was packed.
"""

import torch

AGGREGATION_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    segment_ids: torch.Tensor | None,
    mode: str,
    *,
    denominator: float | torch.Tensor | None = None,
    n_segments: int | None = None,
) -> torch.Tensor:
    """Reduce a per-token loss over the mask.

    - `token-mean`: sum over tokens / number of masked tokens. Every token weighs the same (DAPO).
    - `seq-mean-token-mean`: sum over sequences of their token mean / number of sequences. Every
      sequence weighs the same (GRPO). A sequence must not be split over calls, since each call
      counts the tokens of its sequences.
    - `seq-mean-token-sum`: sum over sequences of their token sum / number of sequences. With a
      `denominator` that is this number times a constant length, it is Dr. GRPO.

    Only sequences with at least one masked token count as sequences.

    Args:
        per_token: float `[T]` or `[B, T]`.
        mask: bool, same shape.
        segment_ids: integers, same shape, or None (see `rlinf_vl.algorithms`).
        denominator: the divisor, a number or a scalar tensor, >= 0: the number of tokens
            (`token-mean`) or sequences (other modes) of the whole mini-batch over all ranks. The
            results of all micro-batches and ranks then sum to the loss of the mini-batch. None
            divides by the count of this call.
        n_segments: promises that `segment_ids` are 0…n_segments-1. Without it, the distinct ids are
            looked up, which waits for a GPU.

    Returns:
        Scalar on the graph of `per_token`, float32 or wider. An empty mask gives 0, with gradients
        of 0.

    Raises:
        ValueError: the mode is unknown, shapes differ, the mask isn't boolean, or the denominator
            is negative.

    Sources: Yu et al., "DAPO" (2025); Shao et al., "DeepSeekMath" (2024); Liu et al.,
    "Understanding R1-Zero-Like Training" (2025).
    """
    check_allowed("mode", mode, AGGREGATION_MODES)
    check_shapes(mask, per_token=per_token)
    if (
        not isinstance(denominator, torch.Tensor)
        and denominator is not None
        and not denominator >= 0
    ):
        raise ValueError(f"denominator must be a count >= 0, got {denominator}")
    values = zero_outside(per_token, mask)
    if mode == "token-mean":
        total = values.double().sum()
        count = mask.sum()
    else:
        _, sums, tokens = segment_sums(values, mask, segment_ids, n_segments)
        total = (sums / tokens.clamp(min=1) if mode == "seq-mean-token-mean" else sums).sum()
        count = (tokens > 0).sum()
    # A count of 0 comes with a total of 0: dividing by 1 gives 0, not NaN. `where` decides on the
    # device; reading a tensor's value here would wait for the GPU.
    divisor = count if denominator is None else denominator
    if isinstance(divisor, torch.Tensor):
        divisor = torch.where(divisor > 0, divisor.to(mask.device).double(), 1.0)
    elif divisor == 0:
        divisor = 1.0
    return (total / divisor).to(values.dtype)


def segment_sums(
    values: torch.Tensor,
    mask: torch.Tensor,
    segment_ids: torch.Tensor | None,
    n_segments: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum `values` and the mask over each sequence.

    Returns:
        The sequence number of each token, int64 0…n-1 of the mask's shape; the sums; the counts of
        masked tokens. Both are float64 `[n]`, so that the order of tokens doesn't show.

    Raises:
        ValueError: segment_ids have another shape than the mask or aren't integers.
    """
    if segment_ids is None:
        n, width = torch.atleast_2d(mask).shape
        index = torch.arange(n, device=mask.device).unsqueeze(1).expand(n, width).view_as(mask)
    elif segment_ids.shape != mask.shape:
        raise ValueError(
            f"segment_ids have shape {tuple(segment_ids.shape)}, mask {tuple(mask.shape)}"
        )
    elif segment_ids.is_floating_point() or segment_ids.dtype == torch.bool:
        raise ValueError(f"segment_ids must be integers, got {segment_ids.dtype}")
    elif n_segments is None:
        unique, index = torch.unique(segment_ids, return_inverse=True)
        n = unique.numel()
    else:
        index, n = segment_ids, n_segments
    zeros = torch.zeros(n, dtype=torch.float64, device=mask.device)
    sums, tokens = (
        zeros.index_add(0, index.flatten(), x.flatten().double()) for x in (values, mask)
    )
    return index, sums, tokens


def zero_outside(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` inside the mask and 0 outside, in float32 or wider.

    Values outside the mask get a gradient of 0, too.
    """
    # `where`, not a product with the mask: NaN times 0 is NaN, in the value and in the gradient.
    return values.to(torch.promote_types(values.dtype, torch.float32)).where(mask, 0.0)


def check_shapes(mask: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless the mask is boolean, 1-D or 2-D, and every tensor has its shape."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean, got {mask.dtype}")
    if mask.ndim not in (1, 2):
        raise ValueError(f"mask must be [T] or [B, T], got shape {tuple(mask.shape)}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, mask {tuple(mask.shape)}")


def check_allowed(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError, which names the allowed values, unless `value` is one of them."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
