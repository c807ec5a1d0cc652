"""What the torch engine keeps of an episode between its turns: it changes nothing but what is prefilled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import (
    EOS,
    IMAGE_ID,
    VISION_END,
    VISION_START,
    answered,
    grids,
    image,
    tiny_model,
    transformers_logprobs,
)
from tiny import prompt as tiny_prompt
from tiny import request as tiny_request

from rlinf_vl.engines.torch.prefix_cache import CachedPrefix, PrefixCache
from rlinf_vl.types import Request, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=6, stop_ids=(EOS,))


def openings(samples=3):
    """First requests of four groups: with an image, without, with two, and one whose answers have a single token."""
    rng = np.random.default_rng(4)
    made = []
    for g, shapes in enumerate([[(2, 3)], [], [(1, 1), (3, 2)], [(2, 2)]]):
        sampling = replace(SAMPLING, max_new_tokens=1) if g == 3 else SAMPLING
        names = tuple(f"{g}/{i}" for i in range(samples))
        seeds = tuple(range(100 * g, 100 * g + samples))
        made.append(replace(tiny_request(rng, shapes, sampling, seeds), sessions=names))
    return made


def continued(request, index, sample, rng, seed):
    """The next turn of sample `index`: the rest of a cut turn, up to two new images, sometimes one that was shown before."""
    shown = [
        image(rng, *(int(n) for n in rng.integers(1, 4, 2))) for _ in range(rng.integers(0, 3))
    ]
    if request.images and rng.random() < 0.4:
        shown.append((request.images[0], request.image_grids[0]))
    rest = [] if sample.ids[-1] == EOS else [EOS]
    new = np.concatenate(
        [rest, tiny_prompt(rng, [grid for _, grid in shown], int(rng.integers(1, 5)))]
    )
    return Request(
        np.concatenate([request.ids, sample.ids, new]).astype(np.int32),
        request.images + tuple(ref for ref, _ in shown),
        np.concatenate([request.image_grids, grids(shown)]),
        SAMPLING,
        (seed,),
        request.sessions[index : index + 1],
    )


def play(engine, turns=4, between=lambda turn: None, fresh=True):
    """Episodes of so many turns, all at once: the (request, sample) of every turn, and the tokens that were new in them."""
    rng = np.random.default_rng(8)
    requests, played, new = openings(), [], sum(len(r.ids) for r in openings())
    for turn in range(turns):
        company = [replace(tiny_request(rng, [(2, 2)], SAMPLING, (5,)))] if fresh else []
        done = engine.generate([*requests[:3], *company, *requests[3:]])
        new += sum(len(r.ids) for r in company)
        done = done[:3] + done[3 + len(company) :]
        following = []
        for request, completion in zip(requests, done, strict=True):
            for i, sample in enumerate(completion.samples):
                played.append((request, sample))
                following.append(
                    continued(request, i, sample, rng, seed=1000 * turn + len(following))
                )
                new += (len(following[-1].ids) - len(request.ids) - len(sample.ids) + 1) * (
                    turn + 1 < turns
                )
        requests = following
        between(turn)
    return played, new


def assert_right(played, model):
    for request, sample in played:
        expected = transformers_logprobs(model, answered(request, [sample]), 0)
        np.testing.assert_allclose(sample.logprobs, expected.detach().numpy(), atol=1e-5)


def ids_of(played):
    return [sample.ids.tolist() for _, sample in played]


def without_sessions(engine):
    submit = engine.submit
    engine.submit = lambda requests: submit([replace(request, sessions=()) for request in requests])
    return engine


@pytest.mark.parametrize(
    ("max_running", "family"),
    [(5, "qwen3_vl"), (64, "qwen3_vl"), (5, "qwen3_5"), (64, "qwen3_5_moe")],
)
def test_each_token_is_computed_once_and_logprobs_are_those_of_a_full_forward(
    engine_of, max_running, family
):
    engine = engine_of(max_running, family)
    played, new = play(engine)
    assert engine.prefilled_tokens == new
    assert_right(played, tiny_model(family=family))
    assert any(s.finish_reason == "length" for _, s in played) and any(
        s.finish_reason == "stop" for _, s in played
    )
    whole = without_sessions(engine_of(max_running, family))
    assert ids_of(play(whole)[0]) == ids_of(played)
    assert whole.prefilled_tokens > 1.5 * new and whole.sessions.bytes == 0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_prompt_is_kept_once_for_its_group_and_states_for_each_of_its_rows(engine_of, family):
    engine = engine_of(family=family)
    (one,) = (r for r in openings(samples=1)[:1])
    many = replace(one, seeds=tuple(range(50)), sessions=tuple(map(str, range(50))))
    engine.generate([replace(many, sampling=replace(SAMPLING, max_new_tokens=1))])
    state = engine.batch.decode_state
    per_token = state.token_bytes(torch.float32)
    assert (state.row_bytes() > 0) == (family == "qwen3_5")
    assert engine.sessions.bytes == len(one.ids) * per_token + 50 * state.row_bytes()
    engine.end_sessions(many.sessions[1:])
    assert engine.sessions.bytes == len(one.ids) * per_token + state.row_bytes()
    engine.end_sessions([*many.sessions, "unknown"])
    assert engine.sessions.bytes == 0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_weights_loaded_between_turns_end_what_was_kept(engine_of, family):
    engine, other = engine_of(family=family), tiny_model(seed=5, family=family)
    weights = {name: p.detach() for name, p in other.named_parameters()}

    def load(turn):
        if turn == 1:
            engine.load_weights([weights], version=1)
            assert engine.sessions.bytes == 0

    played, new = play(engine, between=load, fresh=False)
    of_version = [
        [pair for pair in played if (pair[1].versions == version).all()] for version in (0, 1)
    ]
    assert list(map(len, of_version)) == [24, 24]
    assert_right(of_version[0], tiny_model(family=family))
    assert_right(of_version[1], other)
    in_turn_2 = sum(len(r.ids) for r, _ in played[24:36])
    kept = sum(len(r.ids) + len(s.ids) - 1 for r, s in played[12:24])
    assert engine.prefilled_tokens == new + kept and kept < in_turn_2


@pytest.mark.slow
def test_sessions_may_go_at_any_time(engine_of):
    kept = engine_of()
    expected = ids_of(play(kept)[0])

    engine = engine_of(memory_share=1e-9)  # no room
    played, _ = play(engine)
    assert ids_of(played) == expected and engine.sessions.bytes == 0

    engine = engine_of()
    some = [f"{g}/{i}" for g in range(4) for i in (0, 2)]
    played, new = play(
        engine, between=lambda turn: engine.end_sessions(some) if turn == 1 else None
    )
    assert ids_of(played) == expected and new < engine.prefilled_tokens < 1.5 * new

    engine = engine_of()

    def sleep(turn):
        engine.release_memory(["kv_cache"])
        assert engine.sessions.bytes == 0
        engine.restore_memory(["kv_cache"])

    assert ids_of(play(engine, between=sleep)[0]) == expected


def test_a_request_goes_on_from_what_it_has_in_common_with_its_session(engine_of):
    engine, rng = engine_of(), np.random.default_rng(3)
    request = openings(samples=1)[0]
    sample = engine.generate([request])[0].samples[0]
    following = continued(request, 0, sample, rng, seed=3)
    other, _ = image(rng, 2, 3)
    changed = following.ids.copy()
    changed[0] = changed[0] % 50 + 3
    assert changed[0] not in (following.ids[0], VISION_START, VISION_END)
    image_at = int(np.flatnonzero(request.ids == IMAGE_ID)[0])
    for asked, computed in (
        (replace(following, images=(other, *following.images[1:])), len(following.ids) - image_at),
        (replace(following, ids=changed), len(changed)),
        (replace(request, ids=changed[: len(request.ids)]), 1),
        (following, len(following.ids)),
        (replace(request, seeds=(9,)), 1),  # begins again
    ):
        before = engine.prefilled_tokens
        assert_right([(asked, engine.generate([asked])[0].samples[0])], tiny_model())
        assert engine.prefilled_tokens == before + computed


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_answers_may_lose_tokens_in_the_history(engine_of, family):
    """As thoughts do: what stands before the first lost token is still there, at every turn; but a state is one of all tokens."""
    engine, rng, played = engine_of(family=family), np.random.default_rng(5), []
    requests = [replace(r, seeds=r.seeds[:1], sessions=r.sessions[:1]) for r in openings()]
    new = sum(len(r.ids) for r in requests)
    for turn in range(4):
        samples = [completion.samples[0] for completion in engine.generate(requests)]
        played += zip(requests, samples, strict=True)
        following = []
        for request, sample in zip(requests, samples, strict=True):
            lost = replace(sample, ids=sample.ids[len(sample.ids) // 2 :])
            following.append(continued(request, 0, lost, rng, seed=turn))
            had = np.concatenate([request.ids, sample.ids[:-1]])
            n = min(len(had), len(following[-1].ids))
            shared = int(np.flatnonzero(np.append(had[:n] != following[-1].ids[:n], True))[0])
            new += (
                len(following[-1].ids) - shared * (family == "qwen3_vl" or shared == len(had))
            ) * (turn < 3)
        requests = following
    assert_right(played, tiny_model(family=family))
    assert engine.prefilled_tokens == new


def test_an_image_that_fails_in_a_later_turn_is_its_requests_error(engine_of):
    engine, rng = engine_of(), np.random.default_rng(3)
    request = openings(samples=2)[0]
    samples = engine.generate([request])[0].samples
    following = [continued(request, i, samples[i], rng, seed=i) for i in range(2)]
    broken, _ = image(rng, 1, 1)
    pixels = engine.pixels

    def decoded(ref):
        if ref.hash == broken.hash:
            raise ValueError("truncated")
        return pixels(ref)

    engine.pixels = decoded
    tail = np.array([VISION_START, 60, VISION_END], np.int32)
    following[0] = replace(
        following[0],
        ids=np.concatenate([following[0].ids, tail]),
        images=(*following[0].images, broken),
        image_grids=np.concatenate([following[0].image_grids, [[1, 2, 2]]]),
    )
    failed, good = engine.submit(following)
    with pytest.raises(ValueError, match="truncated"):
        failed.result(timeout=30)
    assert_right([(following[1], good.result(timeout=30).samples[0])], tiny_model())


def kept(*parts):
    return CachedPrefix(np.arange(sum(part.shape[2] for part in parts), dtype=np.int32), (), parts)


def part(tokens):
    return torch.zeros(1, 2, tokens, 1, 1)  # 8 bytes a token


def test_what_was_not_used_for_longest_goes_first():
    sessions, shared = PrefixCache(), part(100)
    sessions.begin("abcd")
    for name in "abc":
        sessions.put(name, kept(shared, part(10)))
    sessions.put("d", kept(part(50)))
    assert sessions.bytes == 8 * (100 + 30 + 50)
    asked = Request(np.arange(200, dtype=np.int32), (), np.zeros((0, 3), np.int32), SAMPLING, (0,))
    assert all(sessions.find(name, asked, IMAGE_ID) for name in "abcd")
    sessions.put("a", kept(shared, part(10), part(5)))
    sessions.shrink(8 * 175)
    assert [sessions.find(name, asked, IMAGE_ID) is not None for name in "abcd"] == [
        True,
        False,
        True,
        True,
    ]
    sessions.shrink(8 * 120)
    assert [sessions.find(name, asked, IMAGE_ID) is not None for name in "abcd"] == [
        True,
        False,
        False,
        False,
    ]
    assert sessions.bytes == 8 * 115
    sessions.end("a")
    assert sessions.bytes == 0
    sessions.put("a", kept(part(10)))
    assert sessions.bytes == 0 and sessions.find("a", asked, IMAGE_ID) is None, "it has ended"
    sessions.put("b", kept(part(10)))
    assert sessions.bytes == 80, "it goes on"
