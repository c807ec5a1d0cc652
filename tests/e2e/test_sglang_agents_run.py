"""Agents as whole runs on the real SGLang: a toy that an agent's function plays is sampled and trained as its environment is.

SGLang draws anew in each run, and honours seeds on GPUs alone, so two runs are compared as far as
they have sampled the same: greedily to the end, else up to the first token that differs. With twice
as many trajectories of the maze 369 greedy prompts were the same, and 98 of 367 where the
temperature is 0.2. What both runs have sampled has logprobs that differ by 5e-6 at most; SGLang's
and the trainer's differ by 2.1e-5.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from whole_run import (
    AGENT_TOYS,
    agent_overrides,
    assert_engine_and_trainer_agree,
    metrics_of,
    played_run,
    trajectories_of,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed here; `bash requirements/install.sh --sglang --dev` makes an environment",
    ),
]
STEPS = 1
#: Groups of eight trajectories in a step, and problems of a validation.
GROUPS, PROBLEMS = 4, 24
TOLERANCE = 1e-4
SGLANG = (
    "cluster.backend=ray",
    "cluster.component_placement.actor=0",
    "rollout.rollout_backend=sglang",
    "rollout.max_running_requests=64",
    f"data.rollout_batch_size={GROUPS}",
    f"data.val_samples={PROBLEMS}",
    # Of two runs more replies are the same than at 1.0.
    "algorithm.sampling_params.temperature=0.2",
    "algorithm.val_sampling_params.temperature=0",
)


@pytest.fixture(scope="module", params=AGENT_TOYS)
def runs(request, tmp_path_factory) -> tuple[Path, Path]:
    """The folders of the run that an agent plays, and of the one that the environment plays."""
    toy, agent = request.param, AGENT_TOYS[request.param]
    folders = []
    for name, overrides in (("agent", agent_overrides(agent)), ("environment", ())):
        folder, settings = tmp_path_factory.mktemp(name), (*SGLANG, *overrides)
        folders.append(played_run(folder, toy, STEPS, *settings))
    return folders[0], folders[1]


def pairs_of(runs: tuple[Path, Path], split: str, step: int) -> list[tuple[pd.Series, pd.Series]]:
    """Return the trajectories of a split and step of both runs, one beside the other."""
    ours, theirs = (trajectories_of(run).loc[split, step] for run in runs)
    assert ours.index.equals(theirs.index)
    assert ours.error.isna().all() and theirs.error.isna().all()
    return [(ours.loc[key], theirs.loc[key]) for key in ours.index]


def same_tokens(own: pd.Series, other: pd.Series) -> int:
    """Return how many tokens behind the prompt are the same in two trajectories of equal seeds.

    The first one that differs must have been sampled, in both: prompts are the same as long as all
    that was sampled is.
    """
    assert own.prompt == other.prompt
    length = min(len(own.response_ids), len(other.response_ids))
    differs = np.flatnonzero(own.response_ids[:length] != other.response_ids[:length])
    if not len(differs):
        assert len(own.response_ids) == len(other.response_ids) == length
        np.testing.assert_array_equal(own.response_mask, other.response_mask)
        return length
    first = int(differs[0])
    np.testing.assert_array_equal(own.response_mask[: first + 1], other.response_mask[: first + 1])
    assert own.response_mask[first], f"a prompt differs at token {first}"
    return first


def prompts_of(trajectory: pd.Series) -> list[list[str]]:
    """Return what each prompt of a trajectory shows: texts, and pictures by their content."""
    (messages,) = json.loads(trajectory.messages)
    prompts = []
    for message in messages:
        if message["role"] != "assistant":
            parts = message["content"]
            prompts.append([p if isinstance(p, str) else trajectory.images[p] for p in parts])
    return prompts


def assert_same_prompts(own: pd.Series, other: pd.Series, n_tokens: int) -> int:
    """Two trajectories with so many equal tokens show the same till there; the number of prompts."""
    mask = own.response_mask[: n_tokens + 1]
    n_prompts = 1 + int((mask[1:] & ~mask[:-1]).sum())
    assert prompts_of(own)[:n_prompts] == prompts_of(other)[:n_prompts]
    return n_prompts


def assert_same_trajectory(own: pd.Series, other: pd.Series) -> None:
    """Trajectories with the same replies are the same in all that is recorded."""
    for column in ("reward", "correct", "finish_reason", "messages"):
        assert own[column] == other[column], column
    assert list(own.images) == list(other.images)
    own_turns, other_turns = (json.loads(t.turns)["turns"] for t in (own, other))
    for own_turn, other_turn in zip(own_turns, other_turns, strict=True):
        assert own_turn["reward"] == pytest.approx(other_turn["reward"])


def assert_same_logprobs(own: pd.Series, other: pd.Series, n_tokens: int) -> None:
    """The engine's logprobs of what both have sampled alike, below the same weights."""
    sampled = own.response_mask[:n_tokens]
    np.testing.assert_allclose(
        own.rollout_logprobs[:n_tokens][sampled],
        other.rollout_logprobs[:n_tokens][sampled],
        rtol=0,
        atol=TOLERANCE,
    )


def test_greedy_trajectories_of_an_agent_are_the_environments(runs) -> None:
    """Before the first update: every id of every prompt and reply, and every reward."""
    pairs = pairs_of(runs, "val", 0)
    assert len(pairs) == PROBLEMS
    n_prompts = 0
    for own, other in pairs:
        assert same_tokens(own, other) == len(own.response_ids)
        assert_same_trajectory(own, other)
        n_prompts += assert_same_prompts(own, other, len(own.response_ids))
        assert_same_logprobs(own, other, len(own.response_ids))
    assert n_prompts > 2 * PROBLEMS
    assert len({own.reward for own, _ in pairs}) > 1


def test_drawn_prompts_of_an_agent_are_the_environments(runs) -> None:
    """First ones all, later ones as long as both runs have drawn the same."""
    pairs = pairs_of(runs, "train", 1)
    assert len(pairs) == 8 * GROUPS
    n_prompts = 0
    for own, other in pairs:
        n_tokens = same_tokens(own, other)
        n_prompts += assert_same_prompts(own, other, n_tokens)
        assert_same_logprobs(own, other, n_tokens)
        if n_tokens == len(own.response_ids):
            assert_same_trajectory(own, other)
    assert n_prompts > len(pairs), "some later prompts"


def test_the_trainer_scores_each_token_as_sglang_does(runs) -> None:
    for run in runs:
        assert_engine_and_trainer_agree(metrics_of(run), STEPS)
        trained = trajectories_of(run).loc["train"]
        by_engine, by_trainer, masks = (
            np.concatenate(trained[name].tolist())
            for name in ("rollout_logprobs", "train_logprobs", "response_mask")
        )
        assert masks.sum() > 8 * GROUPS
        np.testing.assert_allclose(by_engine[masks], by_trainer[masks], rtol=0, atol=TOLERANCE)


def test_an_agents_calls_are_metrics_on_sglang(runs) -> None:
    row = metrics_of(runs[0])[STEPS]
    assert row["agent/calls"] == pytest.approx(row["rollout/turns_mean"])
    assert row["agent/resumed_share"] == 1 and row["agent/branches"] == 0
