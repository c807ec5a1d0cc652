"""Policy losses: one file each, which is all that a built-in loss needs.

A file has, in this order:

- a docstring: a sentence, the formula (indented), remarks, and the source as last paragraph;
  docs/algorithms.md shows formula and source (`docs/generate_algorithm_tables.py`);
- `DEFAULTS`: the keys of `algorithm` that the loss sets where they are null, from its paper;
- `CLIPS`: the keys `algorithm.clip_ratio_*` that it reads; setting another one is refused;
- `NEEDS_MINIBATCH`: True if it calls `LossInputs.minibatch_tokens`;
- `loss(inputs)`: the formula, from `LossInputs` to the loss of each token.

Its name in `algorithm.loss_type` is the file's.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, segment_sums, zero_outside
from rlinf_vl.algorithms.divergence import MAX_LOG_RATIO, divergence
from rlinf_vl.algorithms.measurements import Measurements

LOSS_TYPES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@dataclass(frozen=True, slots=True)
class MiniBatchTokens:
    """All sampled tokens of a mini-batch, over its micro-batches and ranks, in no order.

    Attributes:
        advantages: float32 `[n]`.
        start_logprobs: float32 `[n]`, of the weights before the step's first optimizer step.
        rollout_logprobs: float32 `[n]`, of the engine; those of the start if it gave none.
    """

    advantages: torch.Tensor
    start_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor

    def covariances(self) -> torch.Tensor:
        """Return (A - mean A)(log π - mean log π) of each token, float64 `[n]`."""
        return self.covariances_of(self.advantages, self.start_logprobs)

    def covariances_of(self, advantages: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return the same of some tokens, by the means over the mini-batch."""
        mean_advantage = self.advantages.double().mean()
        mean_logprob = self.start_logprobs.double().mean()
        return (advantages.double() - mean_advantage) * (logprobs.double() - mean_logprob)

    def numbers(self) -> torch.Tensor:
        """Return a number of each token for a draw, int64 `[n]`, >= 0: see `_draw_numbers`."""
        return _draw_numbers(self.rollout_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The per-token tensors of one call, and the settings of the loss.

    Tensors have the mask's shape, `[T]` (in training: the sampled tokens of a micro-batch) or
    `[B, T]`. Floats are float32 or wider, and 0 outside the mask. Only `logprobs` and `entropy`
    have a gradient. A tensor is None where a run has no such values.

    Attributes:
        logprobs: of the policy being trained.
        old_logprobs: of the policy in the denominator of the ratio (`algorithm.old_policy`).
        advantages: of each token.
        mask: bool; a token outside carries no loss.
        segment_ids: integers, the sequence of each token; see `aggregate`.
        n_segments: the number of sequences, if the ids are known to be 0…n_segments-1.
        weights: importance weights, by which the loss is multiplied after the formula.
        entropy: of the policy's distribution.
        start_logprobs: of the weights before the step's first optimizer step.
        rollout_logprobs: of the engine that sampled the token.
        reference_logprobs: of the reference policy, if its KL is in the loss.
        teacher_logprobs: of the teacher.
        versions: int32, version of the weights that sampled the token.
        version: of the weights before the step.
        columns: further values of each token by name, `[T, …]` (`TokenSequence.columns`).
        clip_low, clip_high, clip_c: `algorithm.clip_ratio_low` and so on.
        minibatch: all tokens of the mini-batch, for losses with `NEEDS_MINIBATCH`.
        is_part: whether these tokens may be a part of a mini-batch only, as in training.
        measurements: those that `log` has added.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    segment_ids: torch.Tensor | None = None
    n_segments: int | None = None
    weights: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    start_logprobs: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    version: int = 0
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    clip_low: float | None = None
    clip_high: float | None = None
    clip_c: float | None = None
    minibatch: MiniBatchTokens | None = None
    is_part: bool = False
    measurements: Measurements = field(default_factory=Measurements, compare=False)

    def start(self) -> torch.Tensor:
        """Return the logprobs of the weights before the step; the old ones where they are unknown."""
        return self.old_logprobs if self.start_logprobs is None else self.start_logprobs

    def minibatch_tokens(self) -> MiniBatchTokens:
        """Return all tokens of the mini-batch; those of the call inside the mask if that is all.

        Raises:
            ValueError: the loss did not ask for them.
        """
        if self.minibatch is not None:
            return self.minibatch
        if self.is_part:
            raise ValueError(
                "minibatch_tokens: training gathers the tokens of a mini-batch only for a loss that "
                "asks for them; write NEEDS_MINIBATCH = True in the file of the loss"
            )
        rollout = self.start() if self.rollout_logprobs is None else self.rollout_logprobs
        return MiniBatchTokens(
            self.advantages[self.mask], self.start()[self.mask], rollout[self.mask]
        )

    def draw_numbers(self) -> torch.Tensor:
        """Return each token's number in `MiniBatchTokens.numbers`."""
        rollout = self.rollout_logprobs
        return _draw_numbers(self.start() if rollout is None else rollout)

    def log(self, name: str, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Log the mean of a value over the step's tokens as the metric `loss/NAME`.

        The mean is over the tokens of all micro-batches, ranks and optimizer steps of the step. A
        token that no micro-batch has inside the mask counts nowhere; without any, the metric is
        left out. Values logged twice under one name are two values of that mean.

        Args:
            values: of each token, in the shape of `mask`; or of other units, `[n]`, with a mask of
                their own.
            mask: bool, the tokens that count; None: those that carry loss.

        Raises:
            ValueError: see `Measurements.add`; or values of another shape than the tokens have
                come without a mask.
        """
        self.measurements.add(name, values, self.mask if mask is None else mask, "token")

    def ratio(self) -> torch.Tensor:
        """Return ρ = π(token) / π_old(token); its log is capped at 20 (`MAX_LOG_RATIO`)."""
        return _capped_exp(self.logprobs - self.old_logprobs)

    def sequence_ratio(self) -> torch.Tensor:
        """Return, for each token, the geometric mean of the ratios of its sequence's tokens."""
        return self.sequence_mean(self.logprobs - self.old_logprobs)

    def sequence_mean(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Return, for each token, the exp of the mean of a log-ratio over its sequence's tokens."""
        # Summed over sequences, not over rows: several stand in one packed row.
        log_ratio = zero_outside(log_ratio, self.mask)
        index, sums, tokens = segment_sums(log_ratio, self.mask, self.segment_ids, self.n_segments)
        return _capped_exp((sums / tokens.clamp(min=1)).to(log_ratio.dtype)[index])

    def clipped(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return c(ρ) = clip(ρ, 1 - clip_low, 1 + clip_high).

        Raises:
            ValueError: a bound is missing or negative.
        """
        low, high = self.bounds()
        return ratio.clamp(1 - low, 1 + high)

    def bounds(self) -> tuple[float, float]:
        """Return clip_low and clip_high.

        Raises:
            ValueError: a bound is missing or negative.
        """
        low, high = self.clip_low, self.clip_high
        if low is None or high is None or not (low >= 0 and high >= 0):
            raise ValueError(f"clip_low and clip_high must be >= 0, got {low} and {high}")
        return low, high


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token, and the tensors behind its metrics, in the shape of the mask.

    Attributes:
        loss: of each token; values outside the mask do not count.
        ratio: ρ of each token.
        clipped: bool, tokens whose loss the clip has changed (`actor/clip_fraction`).
        capped: bool, tokens whose loss the dual clip has capped (`actor/dual_clip_fraction`).
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor | None = None
    capped: torch.Tensor | None = None


#: A loss: the loss of each token, with or without what is behind its metrics.
Formula = Callable[[LossInputs], TokenLoss | torch.Tensor]


def formula_of(loss_type: str | Callable[..., Any]) -> Formula:
    """Return the formula of a built-in loss, or of a function.

    Raises:
        ValueError: there is no such loss.
    """
    if callable(loss_type):
        return _six_arguments(loss_type) if takes_six_arguments(loss_type) else loss_type
    check_allowed("loss_type", loss_type, LOSS_TYPES)
    return importlib.import_module(f"{__name__}.{loss_type}").loss


def takes_six_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a loss has the arguments of former releases: `(logprobs, old_logprobs,
    advantages, segment_ids, clip_low, clip_high)`. They are accepted until 0.2."""
    try:
        inspect.signature(function).bind(*range(6))
    except (TypeError, ValueError):
        return False
    return True


def _six_arguments(function: Callable[..., torch.Tensor]) -> Formula:
    """Return the formula that calls a function of six arguments."""
    return lambda inputs: function(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.segment_ids,
        inputs.clip_low,
        inputs.clip_high,
    )


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    clip_c: float | None = None,
    weights: torch.Tensor | None = None,
    loss_type: str | Callable[..., Any] = "actor",
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy-gradient loss per token, optionally importance-weighted.

    At ρ = 1, all built-in losses have the gradient -A·weights.

    Args:
        logprobs: float `[T]` or `[B, T]`, of the policy being trained; the only input that gets a
            gradient.
        old_logprobs: same shape, of the policy at the start of the step.
        advantages: of a shape that broadcasts to it: `[T]`, `[B, T]`, or `[B, 1]` for one per row.
        mask: bool, same shape as `logprobs`.
        clip_low, clip_high: >= 0; required by all types but "sapo".
        clip_c: > 1, or None for no dual clip; used by "actor" and "gspo".
        weights: broadcasts like `advantages`; None is 1.
        loss_type: the name of a file in `rlinf_vl/algorithms/losses`, or a function of
            `LossInputs`.
        segment_ids, n_segments: see `aggregate`. For "gspo", sequences must not be split over
            calls.

    Returns:
        As `weighted_loss`.

    Raises:
        ValueError: shapes that don't fit, a clip out of range, an unknown loss.
    """
    formula = formula_of(loss_type)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=_broadcast("advantages", advantages, mask),
        mask=mask,
        segment_ids=segment_ids,
        n_segments=n_segments,
        weights=None if weights is None else _broadcast("weights", weights, mask),
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
    )
    return weighted_loss(inputs, formula)


def weighted_loss(
    inputs: LossInputs, formula: Formula
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Apply a formula to inputs whose values outside the mask may be anything, NaN included.

    Returns:
        The loss per token times its weight (float32 or wider, 0 outside the mask), and detached
        scalar tensors over the masked tokens (all 0 if there are none): `clip_fraction`, the share
        of tokens that the clip changed, and `dual_clip_fraction`, the share that the dual clip
        capped, if the formula tells; `ratio_mean`; `ratio_max`; `approx_kl`, the mean k3 estimate
        of KL(old‖new).

    Raises:
        ValueError: clip_c is out of range, or the formula returns no loss of each token.
    """
    mask = inputs.mask
    if inputs.clip_c is not None and not inputs.clip_c > 1:
        raise ValueError(f"clip_c must be > 1 or None, got {inputs.clip_c}")
    inputs = _zero_outside_mask(inputs)
    result = formula(inputs)
    # A loss of a user's own may return the tensor alone; its metrics are then those of ρ.
    if not isinstance(result, TokenLoss):
        result = TokenLoss(result, inputs.ratio().detach())
    loss = result.loss
    if not isinstance(loss, torch.Tensor) or loss.shape != mask.shape:
        returned = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"must return the loss of each token, a tensor of shape {tuple(mask.shape)}; "
            f"returned {returned}"
        )
    if inputs.weights is not None:
        loss = loss * inputs.weights
    # Zeroed inputs need not give a loss of zero: ρ of two zeros is 1.
    loss = loss.where(mask, 0.0)

    with torch.no_grad():
        count = mask.sum().clamp(min=1)
        masked_ratio = zero_outside(result.ratio, mask)
        stats: dict[str, torch.Tensor] = {}
        if result.clipped is not None:
            stats["clip_fraction"] = (result.clipped & mask).sum() / count
        if result.capped is not None:
            stats["dual_clip_fraction"] = (result.capped & mask).sum() / count
        stats |= {
            "ratio_mean": masked_ratio.sum() / count,
            # An empty tensor has no maximum; its sum is 0.
            "ratio_max": masked_ratio.max() if mask.numel() else masked_ratio.sum(),
            "approx_kl": divergence(inputs.logprobs, inputs.old_logprobs, mask, "k3").sum() / count,
        }
    return loss, stats


def _zero_outside_mask(inputs: LossInputs) -> LossInputs:
    """Return the inputs with all floats 0 outside the mask, and detached but for those of the
    policy."""
    # Before the formula, not after it: a NaN outside the mask would still reach the gradient,
    # because the derivative of `where` multiplies it by 0.
    zeroed = {}
    for attribute in fields(inputs):
        values = getattr(inputs, attribute.name)
        if isinstance(values, torch.Tensor) and values.is_floating_point():
            values = values if attribute.name in ("logprobs", "entropy") else values.detach()
            zeroed[attribute.name] = zero_outside(values, inputs.mask)
    return replace(inputs, **zeroed)


def _draw_numbers(logprobs: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random numbers that follow from the bits of float32 logprobs, int64 >= 0."""
    bits = logprobs.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    # Two rounds of multiplication and shift spread the low bits over the high ones.
    for factor in (0x45D9F3B, 0x2545F491):
        bits = ((bits ^ (bits >> 16)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _capped_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _broadcast(name: str, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values`, detached and expanded to the mask's shape.

    Raises:
        ValueError: the shapes don't fit; the message has both.
    """
    try:
        return values.detach().expand(mask.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(values.shape)} do not broadcast to the mask's "
            f"{tuple(mask.shape)}"
        ) from None
