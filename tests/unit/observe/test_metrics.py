"""Metric sums are exact over any split; the rollout summary counts what its names say."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from summaries import changed

from rlinf_vl.observe.metrics import MetricSums, summarize_rollout
from rlinf_vl.types import (
    Group,
    GroupSummary,
    ImageRef,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)


def test_mean_is_over_all_items_and_not_over_micro_batches():
    sums = MetricSums()
    sums.add("loss", 10.0, 1)
    sums.add("loss", 0.0, 9)
    assert sums.compute() == {"loss": 1.0}  # a mean of means would say 5


def test_any_split_over_ranks_gives_the_whole():
    values = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ranks = []
    for part in values.split([3, 0, 41, 56]):
        rank = MetricSums()
        for micro in part.split(7):
            rank.add("mean", micro.sum(), micro.numel())
            if micro.numel():
                rank.maximum("max", micro.max())
                rank.minimum("min", micro.min().item())
        ranks.append(rank.state())
    shipped = json.loads(json.dumps(ranks))
    assert MetricSums.merged(shipped).compute() == pytest.approx(
        {"mean": values.mean().item(), "max": values.max().item(), "min": values.min().item()},
        abs=1e-12,
    )


def test_sums_are_kept_in_float64():
    sums = MetricSums()
    for _ in range(1000):
        sums.add("small", torch.tensor(1e-4, dtype=torch.float32), 0)
    sums.add("small", torch.tensor(1e7), 1)
    sums.add("small", -1e7, 0)
    assert sums.compute()["small"] == pytest.approx(0.1, rel=1e-6)


def test_tensors_carry_no_graph():
    sums = MetricSums()
    leaf = torch.ones(3, requires_grad=True)
    sums.add("loss", leaf.sum(), torch.tensor(3))
    sums.maximum("peak", leaf.max())
    assert (
        not sums._values["total"]["loss"].requires_grad
        and not sums._values["maximum"]["peak"].requires_grad
    )
    assert sums.compute() == {"loss": 1.0, "peak": 1.0}


def test_a_mean_over_nothing_is_left_out():
    sums = MetricSums()
    sums.add("kl", 0.0, 0)
    sums.add("loss", torch.tensor(2.0), torch.tensor(4))
    assert sums.compute() == {"loss": 0.5}
    assert MetricSums().compute() == {}


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("order", [[1.0, math.nan, 2.0], [math.nan, 1.0]])
def test_nan_is_not_lost(as_tensor, order):
    sums = MetricSums()
    for value in order:
        scalar = torch.tensor(value) if as_tensor else value
        sums.maximum("max", scalar)
        sums.minimum("min", scalar)
        sums.add("mean", scalar, 1)
    assert all(math.isnan(value) for value in sums.compute().values())


def test_merge_leaves_the_other_alone():
    one, other = MetricSums(), MetricSums()
    other.add("a", 2.0, 1)
    one.add("a", 4.0, 1)
    one.merge(other)
    one.merge(other)
    assert one.compute() == {"a": 8 / 3}
    assert other.compute() == {"a": 2.0}


def trajectory(
    n: int,
    reward: float,
    finish: str = "stop",
    *,
    error: str | None = None,
    version: int = 3,
    turns: int = 1,
    **metrics,
) -> Trajectory:
    prompt = Request(np.zeros(5, np.int32), (), np.zeros((0, 3), np.int32), SamplingParams(), ())
    sample = Sample(
        np.zeros(n, np.int32), np.zeros(n, np.float32), np.full(n, version, np.int32), finish
    )
    sequence = TokenSequence.of_sample(prompt, sample)
    status = "error" if error else finish
    played = (Turn(0, 5, 5, status, 0.0),) * (turns - 1) + (Turn(0, 5, 5 + n, status, 0.0),)
    return Trajectory((sequence,), played, reward, {}, status, reward > 0.5, error, metrics)


def summary(
    name: str, *trajectories: Trajectory, images: bytes = b"", object_bytes: int = 0
) -> GroupSummary:
    """`images`: one byte stands for the encoded bytes of an image."""
    shown = tuple((ImageRef.of(bytes([byte]) * 50), (1, 1, 1)) for byte in images)
    seeing = (replace(t, sequences=(replace(t.sequences[0], images=shown),)) for t in trajectories)
    return GroupSummary.of(
        Group(name, name, 5, tuple(seeing)), placeholder_ids=-1, object_bytes=object_bytes
    )


def test_the_prefill_ratio_is_of_tokens_that_were_shown():
    """Of 17 tokens 5 are the group's prompt, 5 were sampled in two turns, and 7 shown between them."""
    made = summary("g", trajectory(4, 1.0), trajectory(2, 0.0))
    assert "rollout/prefill_ratio" not in summarize_rollout([made], 1.0)
    episode = replace(
        changed(made, tokens=(5 + 3 + 7 + 2, 7), turn_tokens=((3, 2), (2,))), prefilled_tokens=18
    )
    assert summarize_rollout([episode], 1.0)["rollout/prefill_ratio"] == 18 / (5 + 7)


def test_rollout_summary_by_hand():
    metrics = summarize_rollout(
        [
            summary(
                "mixed",
                trajectory(4, 1.0, turns=3, moves=2.0),
                trajectory(8, 0.0, "length", version=2, moves=4.0, lost=1.0),
                images=b"aab",
                object_bytes=100,
            ),
            summary("tied", trajectory(2, 0.0), trajectory(0, 0.0), images=b"b", object_bytes=20),
            # A failure's reward neither counts nor breaks its group's tie.
            summary(
                "tied but for a failure",
                trajectory(6, 1.0),
                trajectory(10, -5.0, error="worker died", turns=9, moves=9.0),
            ),
            summary("failed", trajectory(0, 0.0, error="engine: TimeoutError: 600 s")),
        ],
        seconds=3.0,
    )
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0]
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.4,
            "reward/std": float(np.std(rewards)),
            "reward/zero_std_groups": 2,
            "reward/accuracy": 0.4,
            "rollout/response_length_mean": 20 / 5,
            "rollout/response_length_max": 8,
            "rollout/truncated": 1 / 5,
            "rollout/cut": 0.0,
            "rollout/turns_mean": 7 / 5,
            "rollout/turns_max": 3,
            "env/moves": 3.0,
            "env/lost": 1.0,
            "reward/ungradable": 0,
            "rollout/errors": 2,
            "rollout/engine_errors": 1,
            "rollout/env_errors": 0,
            "rollout/penalized": 0,
            "rollout/hung_env_calls": 0,
            "rollout/empty": 1,
            "rollout/tokens_per_second": 30 / 3,
            "rollout/weight_version_min": 2,
            "rollout/weight_version_max": 3,
            "data/object_store_bytes": 120,
            # 13 a response token, 4 a prompt token, and two images
            "data/unique_bytes": 13 * 30 + 4 * 4 * 5 + 2 * 50,
        }
    )


def test_calls_that_could_not_be_read_are_a_share_of_all_that_were_written():
    groups = [
        summary(
            "g",
            trajectory(4, 1.0, read_tool_calls=5.0, unread_tool_calls=0.0),
            trajectory(4, 0.0, read_tool_calls=0.0, unread_tool_calls=1.0, moves=1.0),
            trajectory(4, 0.0),
            trajectory(4, 0.0, error="worker died", unread_tool_calls=9.0),
        )
    ]
    metrics = summarize_rollout(groups, 1.0)
    assert metrics["rollout/unread_tool_calls"] == 1 / 6
    assert [name for name in metrics if name.startswith("env/")] == ["env/moves"]
    silent = [summary("g", trajectory(4, 1.0, read_tool_calls=0.0, unread_tool_calls=0.0))]
    assert "rollout/unread_tool_calls" not in summarize_rollout(silent, 1.0)


def test_rollout_summary_of_nothing_has_no_nan():
    for summaries in ([], [summary("failed", trajectory(0, 0.0, error="x"))]):
        metrics = summarize_rollout(summaries, seconds=0.0)
        assert all(math.isfinite(value) for value in metrics.values())
        assert "reward/mean" not in metrics and "rollout/weight_version_min" not in metrics
        assert metrics["reward/zero_std_groups"] == 0
