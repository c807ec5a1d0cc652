"""A group through pickle: one buffer for all of its arrays, read in place, and nothing lost."""

import copy
import pickle

import numpy as np
import pytest

from rlinf_vl.types import Group, ImageRef, Trajectory

COLUMNS = ("ids", "response_mask", "logprobs", "versions")


def group(*lengths: int, logprobs: bool = True, images: int = 2) -> Group:
    rng = np.random.default_rng(0)
    trajectories = [
        Trajectory(
            rng.integers(0, 99, n).astype(np.int32),
            rng.random(n) < 0.5,
            rng.random(n).astype(np.float32) if logprobs else None,
            np.full(n, i, np.int32),
            reward=0.1 * i,
            finish_reason="stop",
            correct=bool(i % 2),
            error="why" if i == 1 else None,
        )
        for i, n in enumerate(lengths)
    ]
    grids = np.arange(3 * images, dtype=np.int32).reshape(images, 3)
    refs = tuple(ImageRef.of(rng.bytes(2000)) for _ in range(images))
    return Group("g", "p", np.arange(7, dtype=np.int32), refs, grids, tuple(trajectories), "42")


@pytest.mark.parametrize(
    "sent", [group(3, 0, 5), group(4, logprobs=False, images=0), group(0, logprobs=False, images=0), group()]
)
def test_nothing_is_lost_and_all_arrays_are_one_buffer(sent):
    buffers = []
    inside = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [sent.array_bytes]
    memory = bytes(buffers[0])
    got = pickle.loads(inside, buffers=[memory])
    assert (got.id, got.problem_id, got.answer, got.images) == ("g", "p", "42", sent.images)
    whole = np.frombuffer(memory, np.uint8)
    pairs = [(got.prompt_ids, sent.prompt_ids), (got.image_grids, sent.image_grids)]
    for a, b in zip(got.trajectories, sent.trajectories, strict=True):
        assert (a.reward, a.finish_reason, a.correct, a.error) == (b.reward, b.finish_reason, b.correct, b.error)
        pairs += [(getattr(a, name), getattr(b, name)) for name in COLUMNS]
    for a, b in pairs:
        if b is None:
            assert a is None
            continue
        assert a.dtype == b.dtype and np.array_equal(a, b)
        assert not a.flags.owndata and not a.flags.writeable and (not a.size or np.shares_memory(a, whole))


@pytest.mark.parametrize("remade", [lambda g: pickle.loads(pickle.dumps(g, protocol=4)), copy.deepcopy])
def test_a_group_also_survives_pickles_without_buffers(remade):
    sent = group(3, 0, 5)
    got = remade(sent)
    assert (got.id, got.images) == ("g", sent.images) and np.array_equal(got.prompt_ids, sent.prompt_ids)
    for a, b in zip(got.trajectories, sent.trajectories, strict=True):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)
