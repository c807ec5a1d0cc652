"""Advantage estimators: one file each, which is all that a built-in estimator needs.

A file has, in this order:

- a docstring: a sentence, the formula (indented), remarks, and the source as last paragraph;
  docs/algorithms.md shows formula and source (`docs/generate_algorithm_tables.py`);
- `DEFAULTS`: the keys of `algorithm` that the estimator sets where they are null, from its paper;
- `NEEDS_GROUPS`: True if groups of one trajectory have no advantages;
- `COMPARES_STATES`: True if it can compare turns that answer to the same state (GiGPO);
- `advantages(rewards, group_ids, tokens, *, normalize)`: the formula; see `advantages` below;
- perhaps `token_kl(…)`: the estimator then gives every token a return of its own where the KL to
  the reference is in the reward; see `reinforce_plus_plus`.

Its name in `algorithm.adv_type` is the file's.
"""

import importlib
import pkgutil
from collections.abc import Callable, Hashable, Iterable
from types import ModuleType

import torch

from rlinf_vl.algorithms.advantages import listed
from rlinf_vl.algorithms.aggregation import check_allowed

ESTIMATORS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
#: A user's estimator: (rewards, group_ids, tokens) → advantages.
Estimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def advantages(
    kind: str | Estimator,
    rewards: torch.Tensor,
    group_ids: torch.Tensor | Iterable[Hashable],
    tokens: torch.Tensor,
    *,
    normalize: bool,
) -> torch.Tensor:
    """Return the advantages of one kind of `algorithm.adv_type`.

    Args:
        kind: a value of `algorithm.adv_type`, or a function `(rewards, group_ids, tokens)` that
            returns the advantages. The function gets group ids as int64 numbers from 0 on, by
            first appearance.
        rewards, group_ids: see `group_advantages`.
        tokens: int64 `[N]`, the number of sampled tokens of each trajectory.
        normalize: whether to divide by the standard deviation.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: see `group_advantages`; or a function's result isn't one finite number for each
            reward.
    """
    if callable(kind):
        group_numbers: dict[Hashable, int] = {}
        index = torch.tensor(
            [
                group_numbers.setdefault(g, len(group_numbers))
                for g in listed("group_ids", group_ids, rewards)
            ]
        )
        # A user's function gets copies, since it may write into its arguments.
        result = torch.as_tensor(kind(rewards.clone(), index, tokens.clone())).to(rewards)
        if result.shape != rewards.shape or not torch.isfinite(result).all():
            raise ValueError(
                f"must return {len(rewards)} finite numbers, one for each reward; returned {result}"
            )
        return result.detach()
    return _file(kind).advantages(rewards, group_ids, tokens, normalize=normalize)


def token_kl_of(kind: str | Estimator) -> Callable[..., tuple[torch.Tensor, float]] | None:
    """Return the function `token_kl` of an estimator; None if it has none."""
    return None if callable(kind) else getattr(_file(kind), "token_kl", None)


def _file(kind: str) -> ModuleType:
    """Return the module of a built-in estimator.

    Raises:
        ValueError: there is none of this name.
    """
    check_allowed("adv_type", kind, ESTIMATORS)
    return importlib.import_module(f"{__name__}.{kind}")
