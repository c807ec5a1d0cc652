"""A group through pickle: one buffer for all of its arrays, what is shared written once, and nothing lost."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import tiny

from rlinf_vl.types import Group, Sample, TokenSequence, Trajectory, Turn


def group(
    *lengths: int, logprobs: bool = True, images: int = 2, routes: type | None = None
) -> Group:
    """Trajectories of one sequence each, with a column, and routes of that type; the second one failed, and has a second sequence
    with an image more."""
    rng = np.random.default_rng(0)
    request = tiny.request(rng, [(1, 2)] * images)
    prompt, trajectories = len(request.ids), []
    shared = rng.integers(0, 250, (prompt, 6))
    for i, n in enumerate(lengths):
        columns = {"entropy": rng.random(n).astype(np.float16)}
        if routes is not None:
            chosen = np.concatenate([shared, rng.integers(0, 250, (n, 6))]).astype(routes)
            columns["routes"] = chosen
        drawn = rng.integers(2, 50, n), rng.random(n).astype(np.float32), np.full(n, i, np.int32)
        sample = Sample(*drawn, "stop", columns)
        sequences = [TokenSequence.of_sample(request, sample)]
        if i == 1:
            sequences.append(
                replace(
                    sequences[0],
                    images=(*sequences[0].images, (tiny.image(rng, 1, 1)[0], (1, 2, 2))),
                )
            )
        if not logprobs:
            sequences = [replace(sequence, logprobs=None) for sequence in sequences]
        turns = (Turn(len(sequences) - 1, prompt, prompt + n, "stop", 0.5, '{"state": "a"}'),)
        error = "why" if i == 1 else None
        trajectories.append(
            Trajectory(
                tuple(sequences),
                turns,
                0.1 * i,
                {"format": 0.5},
                "length",
                bool(i % 2),
                error,
                {"moves": i},
                scores=(1.0, None),
                base_reward=0.25,
                teacher_prompt=(5, 6, 7),
            )
        )
    return Group("g", "p", prompt if lengths else 0, tuple(trajectories), "42")


def assert_same(got: Group, sent: Group) -> None:
    assert (got.id, got.problem_id, got.answer, got.prefix_length) == (
        "g",
        "p",
        "42",
        sent.prefix_length,
    )
    for a, b in zip(got.trajectories, sent.trajectories, strict=True):
        assert (
            replace(a, sequences=(), turns=()) == replace(b, sequences=(), turns=())
            and a.turns == b.turns
        )
    for a, b in zip(got.sequences, sent.sequences, strict=True):
        assert a.images == b.images and a.arrays().keys() == b.arrays().keys()
        for name, array in b.arrays().items():
            assert a.arrays()[name].dtype == array.dtype and np.array_equal(a.arrays()[name], array)


@pytest.mark.parametrize(
    "sent",
    [
        group(3, 0, 5), group(4, logprobs=False, images=0), group(0, logprobs=False, images=0), group(),
        group(3, 0, 5, routes=np.uint8), group(4, 2, logprobs=False, routes=np.int16),
    ],
)  # fmt: skip
def test_nothing_is_lost_and_all_arrays_are_one_buffer(sent):
    buffers = []
    inside = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [sent.array_bytes]
    assert_same(pickle.loads(inside, buffers=[bytes(buffers[0])]), sent)


@pytest.mark.parametrize(
    "remade", [lambda g: pickle.loads(pickle.dumps(g, protocol=4)), copy.deepcopy]
)
def test_a_group_also_survives_pickles_without_buffers(remade):
    sent = group(3, 0, 5)
    assert_same(remade(sent), sent)


def test_prefix_and_images_are_written_once():
    sent = tiny.group(np.random.default_rng(0), [(4, 4), (4, 4)], [6] * 8)
    images = sum(len(image.data) for image, _ in sent.images)
    assert sent.array_bytes == 4 * sent.prefix_length + 8 * 6 * 13
    assert len(pickle.dumps(sent, protocol=5)) < images + sent.array_bytes + 1000


def test_routes_of_the_prefix_are_written_once():
    plain, routed = (group(7, 7, 7, 7, routes=routes) for routes in (None, np.uint8))
    tokens = routed.prefix_length + sum(len(s.ids) - routed.prefix_length for s in routed.sequences)
    assert routed.array_bytes == plain.array_bytes + 6 * tokens
