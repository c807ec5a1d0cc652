"""The comparison of a batch: which columns differ, and which known differences reproduce them."""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.tools.verify.compare.batch_file import Batch
from rlinf_vl.tools.verify.compare.columns import ORDER, Calculation, Unavailable
from rlinf_vl.tools.verify.compare.foreign import group_deviations
from rlinf_vl.tools.verify.compare.variants import Variant, all_variants, is_tie_noise

#: The unit of rounding of each dtype, and how many of them a chain of operations may add up to.
ROUNDING = {"float32": (2.0**-23, 64.0), "bfloat16": (2.0**-8, 4.0)}
#: Tokens above which only few pairs of variants are tried.
MANY_TOKENS = 20_000


@dataclass(frozen=True)
class Reason:
    """One or two known differences that together reproduce a column.

    Attributes:
        residual: the largest remaining difference, over the tolerance.
    """

    variants: tuple[Variant, ...]
    residual: float

    @property
    def text(self) -> str:
        return ", and they ".join(variant.text for variant in self.variants)

    def setting(self) -> str:
        """Return the settings of ours that do the same, or "" if there are none."""
        texts = [variant.setting_text() for variant in self.variants]
        return " ".join(texts) if all(texts) else ""


@dataclass
class Comparison:
    """One column.

    Attributes:
        state: "agrees", "differs", "follows" (differs only by a reason of an earlier column) or
            "not compared".
        note: why it was not compared, or the column that it follows from.
        difference: the largest difference; `tolerance` the bound at its place.
        sample, token: the place of the largest difference relative to its bound.
        reasons: those that reproduce the column, the likeliest first.
        nearest: what comes nearest where none reproduces it.
    """

    column: str
    state: str
    note: str = ""
    difference: float = 0.0
    tolerance: float = 0.0
    sample: int | None = None
    token: int | None = None
    theirs: Any = None
    ours: Any = None
    n_differing: int = 0
    n_values: int = 0
    reasons: list[Reason] = field(default_factory=list)
    nearest: Reason | None = None


def compare_numbers(batch: Batch) -> list[Comparison]:
    """Compare the numeric columns of a batch, in the order of computation."""
    comparisons: list[Comparison] = []
    adopted: tuple[Variant, ...] = ()
    source = ""
    for column in ORDER:
        if column not in batch.columns:
            comparisons.append(Comparison(column, "not compared", "not in the file"))
            continue
        comparison = _compare(batch, column, ())
        if comparison.state == "differs" and adopted:
            adjusted = _compare(batch, column, adopted)
            if adjusted.state == "agrees":
                comparison.state, comparison.note = "follows", source
        if comparison.state == "differs":
            _explain(batch, comparison)
            if comparison.reasons and not adopted:
                adopted, source = comparison.reasons[0].variants, column
        comparisons.append(comparison)
    return comparisons


def first_difference(comparisons: Iterable[Comparison]) -> Comparison | None:
    """Return the first column that differs."""
    return next((c for c in comparisons if c.state == "differs"), None)


def _calculation(batch: Batch, column: str, variants: Sequence[Variant]) -> Calculation:
    algorithm: AlgorithmConfig = batch.algorithm
    switches: dict[str, Any] = {}
    if any(variant.changes for variant in variants):
        algorithm = copy.copy(algorithm)
        algorithm.sampling_params = copy.copy(algorithm.sampling_params)
    for variant in variants:
        switches |= variant.switches
        for key, value in variant.changes.items():
            section = (
                algorithm.sampling_params if hasattr(algorithm.sampling_params, key) else algorithm
            )
            setattr(section, key, value)
    return Calculation(batch, algorithm, column, switches)


def _compare(batch: Batch, column: str, variants: Sequence[Variant]) -> Comparison:
    calculation = _calculation(batch, column, variants)
    try:
        ours = calculation.value(column)
    except (Unavailable, ValueError) as error:
        return Comparison(column, "not compared", str(error))
    theirs = batch.columns[column]
    excess, bound = _excess(batch, calculation, column, theirs, ours)
    place = int(excess.argmax()) if excess.numel() else 0
    differing = excess > 1
    comparison = Comparison(
        column,
        "differs" if bool(differing.any()) else "agrees",
        n_differing=int(differing.sum()),
        n_values=int(batch.mask.sum()) if _is_token(batch, theirs) else theirs.numel(),
    )
    if excess.numel():
        values = theirs.reshape(-1).double(), ours.reshape(-1).double()
        comparison.theirs, comparison.ours = (float(value[place]) for value in values)
        comparison.difference = abs(comparison.theirs - comparison.ours)
        comparison.tolerance = float(bound.reshape(-1)[place])
        if _is_token(batch, theirs):
            comparison.sample = int(batch.segment_ids[place])
            comparison.token = int(batch.positions[place])
        elif theirs.ndim:
            comparison.sample = place
    return comparison


def _is_token(batch: Batch, values: torch.Tensor) -> bool:
    return values.ndim == 1 and values.shape == batch.mask.shape and bool(len(batch.mask))


def _excess(
    batch: Batch,
    calculation: Calculation,
    column: str,
    theirs: torch.Tensor,
    ours: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each value's difference over its tolerance (flat), and the tolerance."""
    if theirs.dtype == torch.bool:
        differs = (theirs != ours) & batch.mask
        return differs.double().reshape(-1), torch.zeros_like(differs, dtype=torch.float64)
    bound = _tolerance(batch, calculation, column, theirs, ours)
    excess = (theirs - ours).abs() / bound
    if column not in ("group_mean", "group_std", "loss"):
        excess = excess.where(batch.mask, 0.0)
    return excess.reshape(-1), bound


def _tolerance(
    batch: Batch,
    calculation: Calculation,
    column: str,
    theirs: torch.Tensor,
    ours: torch.Tensor,
) -> torch.Tensor:
    """Return the difference that rounding explains, for each value.

    `unit · steps · scale`: the scale is the size of what is subtracted or added up on the way to
    the value, since a difference of large numbers keeps their rounding. Ratios carry the rounding of
    the logprobs, whose size counts in full.
    """
    unit, steps = ROUNDING[batch.dtype]
    scale = torch.maximum(theirs.abs(), ours.abs())
    try:
        if column == "advantages" and "reward" in batch.columns:
            rewards = batch.columns["reward"]
            deviations = group_deviations(rewards, batch.groups, "sample").clamp(min=1e-6)
            # Where the rewards tie there is nothing to divide by: the exact answer is 0.
            noise = (rewards.abs() / deviations).where(deviations > 1e-5, 0.0)
            scale = scale + noise[batch.segment_ids]
        elif column in ("ratio", "weights"):
            name = "logprobs" if column == "ratio" else "rollout_logprobs"
            size = calculation.value(name).abs()
            if column == "weights" or batch.algorithm.loss_type == "gspo":
                zeros = torch.zeros(batch.n_samples, dtype=size.dtype)
                sums = zeros.index_add(0, batch.segment_ids, size.where(batch.mask, 0.0))
                size = sums[batch.segment_ids]
            scale = scale * (1 + 4 * size / steps)
        elif column == "policy_loss":
            scale = scale + calculation.value("advantages").abs()
        elif column == "kl":
            size = calculation.value("logprobs").abs() + calculation.value("ref_logprobs").abs()
            scale = scale + 1 + size / steps
        elif column == "token_loss":
            scale = scale + calculation.value("policy_loss").abs() + batch.algorithm.kl_beta
        elif column == "loss":
            # The terms cancel in the sum; their rounding does not.
            values = calculation.value("token_loss")[batch.mask].abs()
            scale = scale + (values.mean() if len(values) else 0.0)
            if "token_loss" not in batch.columns and "ratio" not in batch.columns:
                size = calculation.value("logprobs")[batch.mask].abs().mean()
                scale = scale * (1 + size / steps)
    except Unavailable:
        pass
    return unit * steps * scale + 1e-9


def _explain(batch: Batch, comparison: Comparison) -> None:
    """Add the variants, single ones before pairs, that reproduce the recorded column."""
    column, theirs = comparison.column, batch.columns[comparison.column]
    ours = _calculation(batch, column, ())
    ours.value(column)
    stages = ours.computed | {column}
    # The table lists statistics of groups and the clip under the columns that use them.
    stages |= {"group_mean": {"advantages"}, "group_std": {"advantages"}}.get(column, set())
    stages |= {"policy_loss"} if column == "clipped" else set()
    reading = Calculation(batch, batch.algorithm, "")
    tried = [v for v in all_variants(batch, reading) if v.stage in stages]
    singles = [Reason((variant,), _residual(batch, column, (variant,))) for variant in tried]
    comparison.reasons = _likeliest(column, [r for r in singles if r.residual <= 1])
    if comparison.reasons:
        return
    if column == "advantages":
        excess, _ = _excess(batch, ours, column, theirs, ours.value(column))
        if is_tie_noise(batch, theirs, excess > 1):
            noise = next(v for v in tried if v.name == "tie-noise")
            comparison.reasons = [Reason((noise,), 1.0)]
            return
    singles.sort(key=lambda reason: reason.residual)
    is_large = len(batch.mask) > MANY_TOKENS
    leaders = [reason.variants[0] for reason in singles[: 6 if is_large else len(singles)]]
    pairs = []
    for first, second in itertools.combinations(leaders, 2):
        if first.fits(second):
            pair = tuple(sorted((first, second), key=lambda v: ORDER.index(v.stage)))
            pairs.append(Reason(pair, _residual(batch, column, pair)))
    comparison.reasons = _likeliest(column, [r for r in pairs if r.residual <= 1])
    if (
        not comparison.reasons
        and singles
        and singles[0].residual < _residual(batch, column, ()) / 4
    ):
        comparison.nearest = singles[0]


def _likeliest(column: str, reasons: list[Reason]) -> list[Reason]:
    """Return at most eight reasons, those in the column's own formula first."""

    def distance(reason: Reason) -> int:
        return sum(ORDER.index(column) - ORDER.index(v.stage) for v in reason.variants)

    return sorted(reasons, key=lambda reason: abs(distance(reason)))[:8]


def _residual(batch: Batch, column: str, variants: Sequence[Variant]) -> float:
    """Return the largest difference over its tolerance that remains with these variants."""
    calculation = _calculation(batch, column, variants)
    try:
        ours = calculation.value(column)
        excess, _ = _excess(batch, calculation, column, batch.columns[column], ours)
    except (Unavailable, ValueError, ZeroDivisionError):
        return float("inf")
    residual = float(excess.max()) if excess.numel() else 0.0
    return float("inf") if math.isnan(residual) else residual
