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
import inspect
import pkgutil
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from rlinf_vl.algorithms.advantages import listed
from rlinf_vl.algorithms.aggregation import check_allowed
from rlinf_vl.algorithms.measurements import Measurements

ESTIMATORS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
#: A user's estimator: (rewards, group_ids, tokens) → advantages, or (EstimatorInputs) → advantages.
Estimator = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """Values of the N trajectories of a step that carry loss, and of their M turns.

    Trajectories stand in order of their groups, turns in order of their trajectories and of time.

    Attributes:
        rewards: float64 `[N]`, less the penalties of `algorithm.overlong` and of a KL in the
            reward.
        group_ids: int64 `[N]`, the number of each trajectory's group, from 0 on.
        problem_ids: `[N]`, the id of the row of each trajectory.
        tokens: int64 `[N]`, the number of sampled tokens.
        parts: by name, the parts of the reward (`reward/PART`), float64 `[N]`; NaN where a
            trajectory does not have one.
        columns: `[N]`, the columns of the trajectory's row that are short texts or numbers.
        statuses: `[N]`, "stop", or "length" for an answer that was cut.
        correct: bool `[N]`, whether the answer was graded right.
        turn_trajectories: int64 `[M]`, the trajectory of each turn, 0 … N-1.
        turn_rewards: float64 `[M]`, less the same penalties.
        turn_tokens: int64 `[M]`, the number of tokens sampled in each turn.
        turn_versions: int64 `[M]`, the oldest version of the weights that sampled the turn; -1
            without tokens.
        turn_states: `[M]`, the name of the state that the turn answers to; "" if it has none.
        token_rewards: `[N]`, rewards of single tokens (`spans` of reward functions), float64, one
            value for each sampled token in order of the turns; 0 where there is none. They are not
            in `rewards`.
        step: the number of the step; fresh tokens are of version `step - 1`.
        normalize: `algorithm.normalize_advantages`.
        measurements: those that `log` has added.
    """

    rewards: torch.Tensor
    group_ids: torch.Tensor
    problem_ids: Sequence[str]
    tokens: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    columns: Sequence[Mapping[str, str | float]]
    statuses: Sequence[str]
    correct: torch.Tensor
    turn_trajectories: torch.Tensor
    turn_rewards: torch.Tensor
    turn_tokens: torch.Tensor
    turn_versions: torch.Tensor
    turn_states: Sequence[str]
    token_rewards: Sequence[torch.Tensor]
    step: int = 0
    normalize: bool = False
    measurements: Measurements = field(default_factory=Measurements, compare=False)

    def log(self, name: str, values: Any, mask: torch.Tensor | None = None) -> None:
        """Log the mean of a value over the step's trajectories or turns as `advantage/NAME`.

        Args:
            values: a tensor or a list of numbers.
            mask: bool, of their shape: those that count; None: all.

        Raises:
            ValueError: see `Measurements.add`.
        """
        self.measurements.add(name, values, mask, "trajectory or turn")


def takes_inputs(estimator: Estimator) -> bool:
    """Return whether a user's estimator takes `EstimatorInputs`, and not three arguments."""
    try:
        inspect.signature(estimator).bind(*range(3))
    except TypeError:
        return True
    except ValueError:  # functions written in C may have no signature
        return False
    return False


def estimated(
    estimator: Estimator, inputs: EstimatorInputs
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the advantages of a user's estimator: of each turn, or of each token.

    The estimator returns one of three: a number for each trajectory `[N]`, which all its tokens
    get; a number for each turn `[M]`; or a list with a tensor for each trajectory, a number for
    each of its sampled tokens in order of the turns.

    Returns:
        float64 `[M]`, or for each turn the advantages of its tokens, float64.

    Raises:
        ValueError: the result is none of these, or has a number that is not finite.
    """
    result = estimator(inputs)
    n, turns = len(inputs.rewards), inputs.turn_tokens.tolist()
    expected = f"must return {n} numbers, one for each trajectory"
    if turns != inputs.tokens.tolist() or n != len(turns):
        expected += f", or {len(turns)}, one for each turn"
    expected += ", or a list with a tensor for each trajectory: a number for each token"
    if isinstance(result, list | tuple) and result and hasattr(result[0], "__len__"):
        by_trajectory = [torch.as_tensor(x).detach().to(inputs.rewards) for x in result]
        shapes = [tuple(x.shape) for x in by_trajectory]
        if shapes != [(tokens,) for tokens in inputs.tokens.tolist()]:
            raise ValueError(
                f"{expected}; it returned tensors of shapes {shapes}, and the trajectories have "
                f"{inputs.tokens.tolist()} tokens"
            )
        values = torch.cat(by_trajectory)
    else:
        values = torch.as_tensor(result).detach().to(inputs.rewards)
        by_trajectory = []
        if values.shape == inputs.rewards.shape:
            values = values[inputs.turn_trajectories]
        elif values.shape != inputs.turn_tokens.shape:
            raise ValueError(f"{expected}; it returned a tensor of shape {tuple(values.shape)}")
    if not torch.isfinite(values).all():
        raise ValueError(f"must return finite numbers; returned {values.tolist()}")
    return values.split(turns) if by_trajectory else values


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
