"""Scalars of a step, exact over micro-batches and ranks: sums and counts are added, and divided
once at the end."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlinf_vl.types import (
    ENGINE_FAULT,
    ENVIRONMENT_FAULT,
    READ_CALLS,
    UNREAD_CALLS,
    GroupSummary,
    TrajectorySummary,
)

Scalar = float | torch.Tensor
#: Metrics called reward/… that are not the mean of a part of the reward.
OWN_REWARD_METRICS = (
    "reward/mean",
    "reward/std",
    "reward/accuracy",
    "reward/zero_std_groups",
    "reward/shared_states",
)


class MetricSums:
    """Means, maxima and minima by name; each name has one of the three.

    A mean of means would weigh a token by how it was packed; here every micro-batch and rank adds
    its sum and its count, and `compute` divides the totals.

    Tensors are scalars of any dtype. They stay on their device in float64 until `state` or
    `compute` reads them, so neither adding nor merging waits for the device. NaN stays NaN: a
    broken step must look broken.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Scalar]] = {kind: {} for kind in _COMBINE}

    def add(self, name: str, total: Scalar, count: Scalar) -> None:
        """Add a sum over `count` items (tokens, sequences, …) to the mean called `name`."""
        self._put("total", name, total)
        self._put("count", name, count)

    def maximum(self, name: str, value: Scalar) -> None:
        """Keep the largest value called `name`."""
        self._put("maximum", name, value)

    def minimum(self, name: str, value: Scalar) -> None:
        """Keep the smallest value called `name`."""
        self._put("minimum", name, value)

    def merge(self, sums: "MetricSums") -> None:
        """Add the sums of another micro-batch."""
        self._merge(sums._values)

    def state(self) -> dict[str, dict[str, float]]:
        """Return plain floats to send between processes: kind ("total", "count", "maximum",
        "minimum") → name → value."""
        state = {}
        for kind, values in self._values.items():
            state[kind] = {name: float(value) for name, value in values.items()}
        return state

    @classmethod
    def merged(cls, states: Iterable[Mapping[str, Mapping[str, float]]]) -> "MetricSums":
        """Return the sums of many ranks in one, from their states."""
        sums = cls()
        for state in states:
            sums._merge(state)
        return sums

    def compute(self) -> dict[str, float]:
        """Return every metric by name. A mean over nothing is left out."""
        state = self.state()
        means = {
            name: state["total"][name] / count
            for name, count in state["count"].items()
            if count != 0
        }
        metrics = means | state["maximum"] | state["minimum"]
        assert len(metrics) == len(means) + len(state["maximum"]) + len(state["minimum"]), (
            "a name used for two kinds"
        )
        return metrics

    def _merge(self, state: Mapping[str, Mapping[str, Scalar]]) -> None:
        for kind, values in state.items():
            for name, value in values.items():
                self._put(kind, name, value)

    def _put(self, kind: str, name: str, value: Scalar) -> None:
        value = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
        values = self._values[kind]
        values[name] = _COMBINE[kind](values[name], value) if name in values else value


def _larger(a: Scalar, b: Scalar) -> Scalar:
    """Return the larger of two scalars; NaN if either is."""
    if isinstance(a, torch.Tensor):
        return torch.maximum(a, b) if isinstance(b, torch.Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, torch.Tensor) else float(np.maximum(a, b))


_COMBINE: dict[str, Callable[[Any, Any], Scalar]] = {
    "total": operator.add,
    "count": operator.add,
    "maximum": _larger,
    "minimum": lambda a, b: -_larger(-a, -b),
}


def summarize_rollout(summaries: Sequence[GroupSummary], seconds: float) -> dict[str, float]:
    """Return the reward, rollout and data metrics of one batch of groups, generated in `seconds`.

    docs/metrics.md defines them. Trajectories with an error count in `rollout/errors`, tokens per
    second, weight versions and bytes. The other metrics are over those without, penalized ones
    included. Metrics that nothing can be computed from (no groups, no versions, no time) are left
    out.
    """
    trajectories = [trajectory for s in summaries for trajectory in s.trajectories]
    valid = [trajectory for trajectory in trajectories if trajectory.error is None]
    zero_std_groups = sum(len({t.reward for t in s.valid}) == 1 for s in summaries)
    # by name, since groups of one step may share an image
    images = {name: size for s in summaries for name, size in s.image_bytes.items()}
    errors = [t.error for t in trajectories if t.error is not None]
    kinds = [error.partition(": ")[0] for error in errors]
    penalized = sum(bool(t.penalized) for t in trajectories)
    metrics: dict[str, float] = {
        "reward/zero_std_groups": zero_std_groups,
        "reward/ungradable": sum(t.ungradable for t in trajectories),
        "rollout/errors": len(kinds) + penalized,
        "rollout/engine_errors": kinds.count(ENGINE_FAULT),
        "rollout/env_errors": kinds.count(ENVIRONMENT_FAULT) + penalized,
        "rollout/penalized": penalized,
        "rollout/hung_env_calls": max((s.hung_calls for s in summaries), default=0),
        "rollout/empty": sum(t.response_tokens == 0 for t in valid),
        "data/object_store_bytes": sum(s.object_bytes for s in summaries),
        "data/unique_bytes": sum(s.array_bytes for s in summaries) + sum(images.values()),
    }
    if valid:
        metrics |= _episode_metrics(valid)
    metrics |= env_metrics(summaries) | part_metrics(summaries) | _call_metrics(valid)
    if clock_seconds := sum(s.engine_seconds[1] for s in summaries):
        metrics["rollout/engine_busy"] = sum(s.engine_seconds[0] for s in summaries) / clock_seconds
    # The prompt, which a group's trajectories share, counts once; sampled tokens are decoded, not
    # prefilled.
    prompt_and_env_tokens = sum(
        s.prompt_tokens * (1 - len(s.trajectories)) for s in summaries
    ) + sum(t.tokens - sum(t.turn_tokens) for t in trajectories)
    if (prefilled := sum(s.prefilled_tokens for s in summaries)) and prompt_and_env_tokens:
        metrics["rollout/prefill_ratio"] = prefilled / prompt_and_env_tokens
    if seconds > 0:
        metrics["rollout/tokens_per_second"] = (
            sum(t.response_tokens for t in trajectories) / seconds
        )
    sampled = [s for s in summaries if s.max_version >= 0]
    if sampled:
        metrics["rollout/weight_version_min"] = min(s.min_version for s in sampled)
        metrics["rollout/weight_version_max"] = max(s.max_version for s in sampled)
    return metrics


def _episode_metrics(valid: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Return the rewards, lengths, turns and thoughts of trajectories without an error."""
    rewards = np.array([t.reward for t in valid], dtype=np.float64)
    lengths = np.array([t.response_tokens for t in valid])
    metrics: dict[str, float] = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/accuracy": float(np.mean([t.correct for t in valid])),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": int(lengths.max()),
        "rollout/truncated": float(np.mean([t.status == "length" for t in valid])),
        "rollout/cut": float(np.mean([t.cuts > 0 for t in valid])),
    }
    if corrupted := [t.reward for t in valid if t.corrupted]:
        metrics["reward/corrupted_mean"] = float(np.mean(corrupted))
    turns = [t.turns for t in valid]
    metrics["rollout/turns_mean"] = float(np.mean(turns))
    metrics["rollout/turns_max"] = max(turns)
    thoughts = np.array([turn for t in valid for turn in t.turn_thoughts], dtype=np.int64).reshape(
        -1, 3
    )
    if thoughts[:, 0].any():
        thought, answer, closing = thoughts.T
        metrics["rollout/thought_length_mean"] = float(thought.mean())
        metrics["rollout/answer_length_mean"] = float(answer.mean())
        metrics["rollout/thoughts_closed"] = float((closing > 0).mean())
        metrics["rollout/unanswered"] = float((answer == 0).mean())
    return metrics


def _call_metrics(valid: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Return the share of calls of tools that could not be read, where any were written."""
    unread = sum(t.metrics.get(UNREAD_CALLS, 0) for t in valid)
    written = unread + sum(t.metrics.get(READ_CALLS, 0) for t in valid)
    return {"rollout/unread_tool_calls": unread / written} if written else {}


def env_metrics(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Return `env/NAME`: each measurement of the environments, averaged over the trajectories
    without an error that have it.

    Measurements of agents' sessions are called `agent/NAME` already.
    """
    means = _means("env/", [t.metrics for s in summaries for t in s.valid])
    for name in (READ_CALLS, UNREAD_CALLS):
        means.pop(f"env/{name}", None)  # they are `rollout/unread_tool_calls`
    return {
        name.removeprefix("env/") if name.startswith("env/agent/") else name: mean
        for name, mean in means.items()
    }


def part_metrics(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Return `reward/PART`: the mean of each part of the reward, over the trajectories without an
    error that have it.

    A part whose name is that of another metric is `reward/PART_part`.
    """
    means = _means("reward/", [t.reward_parts for s in summaries for t in s.valid])
    return {
        f"{name}_part" if name in OWN_REWARD_METRICS else name: mean for name, mean in means.items()
    }


def _means(prefix: str, measurements: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for named_values in measurements:
        for name, value in named_values.items():
            values.setdefault(prefix + name, []).append(value)
    return {name: sum(items) / len(items) for name, items in sorted(values.items())}
