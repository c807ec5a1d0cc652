"""Packed rows of trees of shared prefixes against one sequence per row: logprobs, gradients, and what comes with each token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from summaries import values
from tiny import (
    IMAGE_ID,
    IMAGE_TOKENS,
    MERGE,
    PAD,
    VISION_END,
    VISION_START,
    banned,
    image,
    pixels,
    tiny_model,
)

from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import Group, GroupSummary, TokenSequence, Trajectory, Turn

FAMILY = FAMILIES["qwen3_vl"]
RNG = np.random.default_rng(7)
PICTURES = [image(RNG, *shape) for shape in [(1, 1), (1, 2), (2, 2), (1, 2)]]
COLLATE = Collator(FAMILY, IMAGE_TOKENS, pixels, PAD)


def policy_of(family: str) -> PolicyModel:
    model = use_packed_attention(tiny_model(family=family), FAMILIES[family])
    return PolicyModel(model, FAMILIES[family], banned(), temperature=0.8, chunk=None)


@pytest.fixture(scope="module")
def policy():
    return policy_of("qwen3_vl")


def piece(rng, n):
    """(ids, images) of `n` stretches of text or single images. Few texts and pictures: branches often begin alike."""
    ids, images = [], []
    for _ in range(n):
        if rng.random() < 0.3:
            ref, grid = PICTURES[rng.integers(len(PICTURES))]
            ids += [VISION_START, *[IMAGE_ID] * (int(grid.prod()) // MERGE**2), VISION_END]
            images.append((ref, tuple(grid.tolist())))
        else:
            ids += rng.integers(2, 5, rng.integers(1, 5)).tolist()
    return ids, images


def sequence_of(rng, ids, images, prompt):
    """Any text token after the prompt may be sampled; what was noted with it differs from sequence to sequence."""
    ids = np.array(ids, np.int32)
    mask = (np.arange(len(ids)) >= prompt) & (ids < IMAGE_ID) & (rng.random(len(ids)) < 0.6)
    logprobs = np.where(mask, rng.normal(size=len(ids)), 0).astype(np.float32)
    columns = {"entropy": np.where(mask, rng.random(len(ids)), 0).astype(np.float32)}
    return TokenSequence(
        ids, mask, logprobs, np.where(mask, 3, -1).astype(np.int32), tuple(images), columns
    )


def trajectory_of(sequences, rng=None):
    """Each sequence is a turn, or two, cut anywhere."""
    turns = []
    for j, sequence in enumerate(sequences):
        cut = int(rng.integers(0, len(sequence.ids))) if rng else 0
        turns += [
            Turn(j, start, end, "stop", 0.0) for start, end in ((0, cut), (cut, len(sequence.ids)))
        ]
    return Trajectory(tuple(sequences), tuple(turns), 0.0, {}, "stop")


def random_tree(rng, name):
    """A group whose trajectories have several sequences, continuing each other to a depth of 4 with the prompt."""
    prompt, shown = piece(rng, 2)

    def branches(ids, images, depth):
        more, seen = piece(rng, rng.integers(1, 3))
        ids, images = ids + more, images + seen
        children = rng.integers(0, 3) if depth < 4 else 0
        found = (
            [sequence_of(rng, ids, images, len(prompt))]
            if not children or rng.random() < 0.2
            else []
        )
        return found + [
            sequence for _ in range(children) for sequence in branches(ids, images, depth + 1)
        ]

    trajectories = tuple(
        trajectory_of(branches(prompt, shown, 2), rng) for _ in range(rng.integers(1, 3))
    )
    return Group(name, name, len(prompt), trajectories)


def loss_of(policy, batch):
    """Logprobs, and a loss in which every token counts differently, by its advantage, logprob and column."""
    logprobs, _ = policy(batch)
    weights = batch.advantages + batch.rollout_logprobs + batch.columns["entropy"]
    return logprobs.detach(), (logprobs * torch.from_numpy(weights)).sum()


def gradient(policy, loss):
    grads = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None])


def test_tokens_may_have_advantages_of_their_own():
    """However trajectories are packed, a token has the value at its place in its turn."""
    rng = np.random.default_rng(5)
    groups = [random_tree(rng, f"g{k}") for k in range(6)]
    members, expected = [], {}
    for n, g in enumerate(groups):
        for i, t in enumerate(g.trajectories):
            by_turn = [rng.normal(size=k).astype(np.float32) for k in t.turn_tokens]
            if i % 2:
                by_turn[0] = 0.25  # a turn as a whole, beside tokens
            members.append(Member(g, i, by_turn))
            left = [
                iter(np.broadcast_to(x, k)) for x, k in zip(by_turn, t.turn_tokens, strict=True)
            ]
            expected[n, i] = [next(left[k]) for ks in t.turn_numbers() for k in ks.tolist()]
    collate = replace(COLLATE, pixels=None)
    numbers = {g.id: n for n, g in enumerate(groups)}
    assert any(
        len(set(values)) > len(groups[n].trajectories[i].turns)
        for (n, i), values in expected.items()
    )
    for cuts in ([len(members)], [3, len(members)], list(range(1, len(members) + 1))):
        for start, end in zip([0, *cuts], cuts, strict=False):
            batch = collate(members[start:end], run_vision=False)
            for place, member in enumerate(members[start:end]):
                found = batch.advantages[batch.trajectories == place]
                assert found.tolist() == expected[numbers[member.group.id], member.index]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_parts_of_a_row_make_the_row(size):
    rng = np.random.default_rng(3)
    groups = [random_tree(rng, f"g{k}") for k in range(4)]
    members = [
        Member(g, i, rng.normal(size=len(t.turns)))
        for g in groups
        for i, t in enumerate(g.trajectories)
    ]
    collate = replace(COLLATE, pixels=None)
    row = collate(members, run_vision=False)
    parts = [replace(collate, part=(rank, size))(members, run_vision=False) for rank in range(size)]
    n, filler = len(row.ids), -len(row.ids) % size
    assert {len(part.ids) for part in parts} == {(n + filler) // size}
    ids = np.concatenate([part.ids for part in parts])
    positions = np.concatenate([part.positions for part in parts], axis=1)
    assert (ids[:n] == row.ids).all() and not ids[n:].any()
    assert (positions[:, :n] == row.positions).all()
    sampled = np.concatenate([part.part.sampled for part in parts])
    assert sorted(sampled) == list(range(len(row.targets)))

    def features_of(batch, start):
        """(position, hash, which of its features) of each placeholder."""
        counts = IMAGE_TOKENS(batch.grids)
        names = [(name, k) for name, n in zip(batch.images, counts, strict=True) for k in range(n)]
        places = (batch.image_positions + start).tolist()
        return [(at, *names[i]) for at, i in zip(places, batch.image_features, strict=True)]

    found = []
    for rank, part in enumerate(parts):
        start = rank * len(part.ids)
        assert part.part.tokens == slice(start, start + len(part.ids))
        assert (part.predict + start == row.predict[part.part.sampled]).all()
        assert (part.targets == row.targets[part.part.sampled]).all()
        assert {name for _, name, _ in features_of(part, start)} == set(part.images)
        found += features_of(part, start)
        bounds, prefix, copies = row.cu_seqlens, row.prefix, row.copies
        if filler:
            bounds, prefix, copies = [*bounds, n + filler], [*prefix, -1], [*copies, 0]
        assert list(part.cu_seqlens) == list(bounds)
        assert (list(part.prefix), list(part.copies)) == (list(prefix), list(copies))
    assert found == features_of(row, 0) and len({name for _, name, _ in found}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "trees", "share"),
    [("qwen3_vl", 200, True), ("qwen3_vl", 20, False), ("qwen3_5", 20, True)],
)
def test_random_trees_equal_one_sequence_per_row(family, trees, share):
    """20 trees in a row. Gated delta nets are continued along them, to any depth."""
    rng, saved, policy = np.random.default_rng(0), 0, policy_of(family)
    collate = replace(COLLATE, share_prompts=share)
    for first in range(0, trees, 20):
        groups = [random_tree(rng, f"g{first + k}") for k in range(20)]
        members = [
            Member(g, i, rng.normal(size=len(t.turns)))
            for g in groups
            for i, t in enumerate(g.trajectories)
        ]
        batch = collate(members, run_vision=True)
        packed, loss = loss_of(policy, batch)
        alone, alone_loss = [], torch.zeros(())
        for member in members:
            for j, sequence in enumerate(member.trajectory.sequences):
                turns = [
                    (replace(t, sequence=0), k)
                    for k, t in enumerate(member.trajectory.turns)
                    if t.sequence == j
                ]
                own = Trajectory((sequence,), tuple(turn for turn, _ in turns), 0.0, {}, "stop")
                single = replace(member.group, trajectories=(own,))
                row = COLLATE(
                    [Member(single, 0, [member.advantages[k] for _, k in turns])], run_vision=True
                )
                assert len(row.cu_seqlens) == 2
                logprobs, its_loss = loss_of(policy, row)
                alone.append(logprobs)
                alone_loss = alone_loss + its_loss
                saved += len(row.ids)
        torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)
        ours, expected = gradient(policy, loss), gradient(policy, alone_loss)
        assert (ours - expected).norm() <= 1e-5 * expected.norm()
        saved -= len(batch.ids)
        summaries = [GroupSummary.of(g, IMAGE_ID) for g in groups]
        if share:
            lone = sum(
                values(s, "tokens")[0] if len(values(s, "tokens")) == 1 else 0 for s in summaries
            )
            together = sum(
                s.prompt_tokens + sum(n - s.prompt_tokens for n in values(s, "tokens"))
                for s in summaries
                if len(values(s, "tokens")) > 1
            )
            assert len(batch.ids) == lone + together, "what the planner counts"
        else:
            assert len(batch.ids) == sum(sum(values(s, "tokens")) for s in summaries)
    assert saved > 0


def test_a_branch_is_cut_before_an_image_that_differs():
    rng = np.random.default_rng(0)
    (first, grid), (second, same_grid) = PICTURES[1], PICTURES[3]
    assert grid.tolist() == same_grid.tolist()
    grid = tuple(grid.tolist())
    ids = [
        2,
        3,
        VISION_START,
        IMAGE_ID,
        IMAGE_ID,
        VISION_END,
        4,
        VISION_START,
        IMAGE_ID,
        IMAGE_ID,
        VISION_END,
        4,
        2,
    ]
    a = sequence_of(rng, ids, [(first, grid), (first, grid)], 2)
    b = sequence_of(rng, ids, [(first, grid), (second, grid)], 2)
    c = sequence_of(rng, [*ids, 3], a.images, 2)
    assert [x.shared_length(y, IMAGE_ID) for x, y in ((a, b), (b, a), (a, c), (c, a), (b, c))] == [
        8,
        8,
        13,
        13,
        8,
    ]
    group = Group("g", "g", 2, (trajectory_of((a, b, c)),))
    batch = COLLATE([Member(group, 0, [1.0] * 6)], run_vision=True)
    assert batch.prefix.tolist() == [-1, 0, 1, 0] and np.diff(batch.cu_seqlens).tolist() == [
        8,
        5,
        1,
        5,
    ]
    assert values(GroupSummary.of(group, IMAGE_ID), "tokens") == (19,) and len(batch.images) == 2


def test_a_sampled_token_of_a_shared_segment_counts_for_each_sequence():
    ids, mask = np.array([2, 3, 4, 5], np.int32), np.array([False, True, True, True])
    sequences = tuple(
        TokenSequence(np.append(ids[:3], [k]).astype(np.int32), mask, np.full(4, -k, np.float32) * mask, ids,
                      columns={"k": 10 * k + np.arange(4)})
        for k in (5, 6)
    )  # fmt: skip
    turns = (Turn(0, 1, 3, "stop", 0.0), Turn(0, 3, 4, "stop", 0.0), Turn(1, 1, 4, "stop", 0.0))
    group = Group("g", "g", 1, (Trajectory(sequences, turns, 0.0, {}, "stop"),))
    batch = COLLATE([Member(group, 0, (2.0, 3.0, 4.0))], run_vision=False)
    assert batch.ids.tolist() == [2, 3, 4, 5, 6] and batch.prefix.tolist() == [-1, 0, 0]
    assert batch.predict.tolist() == [0, 1, 2, 0, 1, 2] and batch.targets.tolist() == [
        3,
        4,
        5,
        3,
        4,
        6,
    ]
    assert batch.trajectories.tolist() == [0] * 6 and batch.turns.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.advantages.tolist() == [2.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert values(GroupSummary.of(group, IMAGE_ID), "turn_tokens") == ((2, 1, 3),)
    assert batch.rollout_logprobs.tolist() == [-5] * 3 + [-6] * 3
    assert batch.columns["k"].tolist() == [51, 52, 53, 61, 62, 63]


def test_routes_come_with_their_tokens_and_a_shared_prompt_counts_for_each_response():
    def sequence(response, routed):
        ids = np.array([2, 3, 4, *response], np.int32)
        routes = (10 * ids[:, None] + np.arange(2)).astype(np.uint8)
        columns = {"routes": routes} if routed else {}
        return TokenSequence(ids, np.arange(len(ids)) >= 3, None, ids, columns=columns)

    def of(*responses, routed=True):
        group = Group("g", "g", 3, tuple(trajectory_of((sequence(r, routed),)) for r in responses))
        return replace(COLLATE, pad_to=12)(
            [Member(group, i, [1.0] * 2) for i in range(len(responses))], run_vision=False
        )

    batch = of([5, 6], [7])
    assert batch.ids.tolist() == [2, 3, 4, 5, 6, 7] + [PAD] * 6 and batch.copies.tolist() == [
        2,
        1,
        1,
        0,
    ]
    routes = batch.row_columns["routes"]
    assert routes.dtype == np.uint8
    assert routes[:6].tolist() == [[10 * i, 10 * i + 1] for i in range(2, 8)]
    assert not routes[6:].any()
    assert batch.columns["routes"].tolist() == [[10 * i, 10 * i + 1] for i in (5, 6, 7)]
    for empty in (of([5], routed=False), COLLATE([], run_vision=False)):
        assert empty.row_columns == empty.columns == {}
