"""The mathematics of the update: pure functions on torch tensors, to be read beside the papers.

Conventions of all functions:

- Per-token tensors are float, 1-D `[T]` (packed) or 2-D `[B, T]` (padded), with a boolean mask of
  the same shape. Values outside the mask, NaN included, change neither a value nor a gradient.
- Sequences are the segments of `segment_ids`: integers of the mask's shape; tokens of one id are
  one sequence, wherever they stand in the call. Without `segment_ids`, each row of a 2-D tensor is
  a sequence, and a 1-D tensor is one sequence.
- float16 and bfloat16 are computed in float32.
"""

from rlinf_vl.algorithms.advantages import (
    decoupled_advantages,
    group_advantages,
    token_moments,
    token_normalized,
)
from rlinf_vl.algorithms.aggregation import AGGREGATION_MODES, aggregate
from rlinf_vl.algorithms.corrections import (
    IMPORTANCE_LEVELS,
    importance_weights,
    interpolated_logprobs,
    log_ratios,
    rejection_mask,
    weight_totals,
)
from rlinf_vl.algorithms.credit import (
    discounted_returns,
    gigpo_advantages,
    process_advantages,
    turn_advantages,
)
from rlinf_vl.algorithms.divergence import DIVERGENCE_ESTIMATORS, divergence, reverse_kl
from rlinf_vl.algorithms.estimators import EstimatorInputs, advantages
from rlinf_vl.algorithms.losses import LossInputs, policy_loss

__all__ = [
    "AGGREGATION_MODES",
    "DIVERGENCE_ESTIMATORS",
    "IMPORTANCE_LEVELS",
    "EstimatorInputs",
    "LossInputs",
    "advantages",
    "aggregate",
    "decoupled_advantages",
    "discounted_returns",
    "divergence",
    "gigpo_advantages",
    "group_advantages",
    "importance_weights",
    "interpolated_logprobs",
    "log_ratios",
    "policy_loss",
    "process_advantages",
    "rejection_mask",
    "reverse_kl",
    "token_moments",
    "token_normalized",
    "turn_advantages",
    "weight_totals",
]
