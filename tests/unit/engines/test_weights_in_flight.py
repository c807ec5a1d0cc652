"""Weights that the torch engine takes while requests run: each token is explained by the version that it says sampled it.

Expected logprobs are transformers' own: a full forward of the whole sequence where keys and values are computed again, and its own
incremental decoding with the weights swapped in mid-way where they are kept.
"""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapters import peft_model
from tiny import answered, banned, tiny_model, transformers_inputs, transformers_logprobs
from tiny import request as tiny_request

from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.models.lora import is_adapter
from rlinf_vl.types import Request, Sample, SamplingParams, TokenSequence

FAMILIES = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")
LONG = SamplingParams(max_new_tokens=40)


def requests(samples=3, sampling=LONG):
    """Groups with an image, without, with two; samples of one length end after the first update."""
    rng = np.random.default_rng(4)
    made = []
    for g, shapes in enumerate([[(2, 3)], [], [(1, 1), (3, 2)]]):
        names = tuple(f"{g}/{i}" for i in range(samples))
        own = replace(sampling, max_new_tokens=8) if g == 1 else sampling
        made.append(replace(tiny_request(rng, shapes, own, tuple(range(samples))), sessions=names))
    return made


def models(family, n=3):
    return [tiny_model(seed=seed, family=family) for seed in range(n)]


def weights_of(model):
    return [{name: p.detach().clone()} for name, p in model.named_parameters()]


def stopping(engine, steps, monkeypatch):
    """Pause the engine after each of these decoding steps, and wait for it: an iterator over the stops."""
    decode, done, stopped = engine.batch.decode, [], threading.Event()

    def decode_some(version):
        decode(version)
        done.append(version)
        if len(done) in steps:
            engine._paused = True
            stopped.set()

    monkeypatch.setattr(engine.batch, "decode", decode_some)

    def stops():
        for _ in steps:
            assert stopped.wait(60)
            stopped.clear()
            yield
            engine.resume()

    return stops()


def updated(engine, asked, by_version, steps, monkeypatch, first=1):
    """Answers to requests, with weights `first`, `first` + 1, … loaded after these decoding steps."""
    stops = stopping(engine, steps, monkeypatch)
    futures = engine.submit(asked)
    for version, _ in enumerate(stops, first):
        engine.load_weights(weights_of(by_version[version]), version)
    return [future.result(timeout=60) for future in futures]


def assert_explained(asked, done, by_version):
    """Each token by a full forward of its version's weights; the versions of a sample never fall."""
    for request, completion in zip(asked, done, strict=True):
        for i, sample in enumerate(completion.samples):
            assert (np.diff(sample.versions) >= 0).all()
            group = answered(request, completion.samples)
            expected = np.stack(
                [transformers_logprobs(model, group, i).detach().numpy() for model in by_version]
            )
            own = expected[sample.versions, np.arange(len(sample.ids))]
            np.testing.assert_allclose(sample.logprobs, own, atol=3e-5)
            if sample.versions[-1] > 0:
                assert np.abs(expected[0] - own).max() > 0.05, (
                    "the weights differ too little for this to say anything"
                )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("samples, max_running", [(3, 4), (3, 64), (1, 64)])
def test_recomputed_rows_are_those_of_a_full_forward(
    engine_of, family, samples, max_running, monkeypatch
):
    """Updates after the very first token, within, and twice with nothing between; with 4 rows groups wait for each other."""
    engine, by_version, asked = engine_of(max_running, family), models(family, 4), requests(samples)
    done = updated(engine, asked, by_version, (1, 12, 13), monkeypatch)
    assert_explained(asked, done, by_version)
    seen = {tuple(np.unique(s.versions)) for completion in done for s in completion.samples}
    assert (0, 1, 2, 3) in seen and len(seen) > 1, seen


def test_nothing_changes_if_the_same_weights_come_again(engine_of, monkeypatch):
    """Rows go on from where they were: the ids, of every row, are those of an undisturbed run."""
    plain = engine_of().generate(requests())
    done = updated(engine_of(), requests(), [tiny_model()] * 4, (2, 3, 20), monkeypatch)
    for a, b in zip(plain, done, strict=True):
        for x, y in zip(a.samples, b.samples, strict=True):
            assert x.ids.tolist() == y.ids.tolist()
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


def test_long_prompts_are_computed_again_in_parts(engine_of, monkeypatch):
    monkeypatch.setattr("rlinf_vl.engines.torch.batch.PREFILL_TOKENS", 24)
    engine, by_version, asked = engine_of(), models("qwen3_vl"), requests()
    done = updated(engine, asked, by_version, (5, 9), monkeypatch)
    assert_explained(asked, done, by_version)


def test_what_was_recomputed_serves_the_next_turn(engine_of, monkeypatch):
    """A session's keys and values are all of the last weights, so its next turn computes only what is new."""
    engine, by_version = engine_of(), models("qwen3_vl", 2)
    asked = requests(2)[:1]
    (done,) = updated(engine, asked, by_version, (5,), monkeypatch)
    before, sample = engine.prefilled_tokens, done.samples[1]
    ids = np.concatenate([asked[0].ids, sample.ids, np.array([5, 6, 7], np.int32)])
    following = Request(
        ids, asked[0].images, asked[0].image_grids, LONG, (9,), asked[0].sessions[1:]
    )
    (next_turn,) = engine.generate([following])
    assert engine.prefilled_tokens - before == 1 + 3
    assert_explained([following], [next_turn], by_version)


def test_adapters_alone_are_swapped(engine_of, monkeypatch):
    """The base's weights stay; expected is peft's own model."""
    settings = LoraConfig(rank=4, alpha=8)
    engine, asked = engine_of(adapters=settings), requests(2)
    by_version = [peft_model("qwen3_vl", settings) for _ in range(3)]
    for version, model in enumerate(by_version):
        torch.manual_seed(version)
        for name, p in model.named_parameters():
            if is_adapter(name):
                p.data = 0.2 * version * torch.randn(p.shape)
    stops = stopping(engine, (3, 12), monkeypatch)
    futures = engine.submit(asked)
    for version, _ in enumerate(stops, 1):
        adapters = [
            (name, p.detach())
            for name, p in by_version[version].named_parameters()
            if is_adapter(name)
        ]
        assert adapters
        engine.load_weights([dict(adapters)], version)
    done = [future.result(timeout=60) for future in futures]
    assert_explained(asked, done, by_version)


def kept_logprobs(family, by_version, request, sample, following=()):
    """Transformers' own incremental decoding of a sample, one token at a time, by the weights of each token's version; then of
    others, each with the ids that stand before it, which are computed by the weights of its first token."""
    model = tiny_model(family=family)
    nothing = Sample(sample.ids[:0], sample.logprobs[:0], sample.versions[:0], "")
    new, inputs = transformers_inputs(TokenSequence.of_sample(request, nothing))
    model.model.rope_deltas = None
    found, past, last = [], None, []
    with torch.no_grad():
        for shown, drawn in (((), sample), *following):
            new = torch.tensor([[*last, *shown]], dtype=torch.int64) if past is not None else new
            for token, version in zip(drawn.ids.tolist(), drawn.versions.tolist(), strict=True):
                model.load_state_dict(by_version[version].state_dict())
                out = model(input_ids=new, past_key_values=past, use_cache=True, **inputs)
                logits = out.logits[0, -1].float()
                logits[torch.from_numpy(banned())] = -torch.inf
                found.append(float(logits.log_softmax(-1)[token]))
                past, inputs, last = out.past_key_values, {}, [token]
                new = torch.tensor([last], dtype=torch.int64)
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_rows_are_those_of_decoding_with_swapped_weights(engine_of, family, monkeypatch):
    engine, by_version, asked = engine_of(family=family, keep_kv=True), models(family), requests(2)
    done = updated(engine, asked, by_version, (3, 12), monkeypatch)
    prompts = sum(len(request.ids) for request in asked)
    assert engine.prefilled_tokens == prompts, "it computed something again"
    for request, completion in zip(asked, done, strict=True):
        for sample in completion.samples:
            expected = kept_logprobs(family, by_version, request, sample)
            np.testing.assert_allclose(sample.logprobs, expected, atol=3e-5)
    swapped = done[0].samples[0]
    whole = transformers_logprobs(by_version[2], answered(asked[0], [swapped]), 0).detach().numpy()
    assert np.abs(whole - swapped.logprobs)[swapped.versions == 2].max() > 1e-3, (
        "then there is nothing to tell apart"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_kept_serves_the_next_turn(engine_of, family, monkeypatch):
    """An update within the first answer, one between the turns, one within the second: the next turn computes only what is new."""
    engine, by_version, asked = (
        engine_of(family=family, keep_kv=True),
        models(family, 4),
        requests(2)[:1],
    )
    (done,) = updated(engine, asked, by_version, (5,), monkeypatch)
    engine.load_weights(weights_of(by_version[2]), 2)
    before, sample, shown = engine.prefilled_tokens, done.samples[1], (5, 6, 7)
    ids = np.concatenate([asked[0].ids, sample.ids, np.array(shown, np.int32)])
    request = Request(ids, asked[0].images, asked[0].image_grids, LONG, (9,), asked[0].sessions[1:])
    following = updated(engine, [request], by_version, (6,), monkeypatch, first=3)[0].samples[0]
    assert set(sample.versions) == {0, 1} and set(following.versions) == {2, 3}
    assert engine.prefilled_tokens - before == 1 + len(shown)
    expected = kept_logprobs(family, by_version, asked[0], sample, [(shown, following)])
    np.testing.assert_allclose(
        np.concatenate([sample.logprobs, following.logprobs]), expected, atol=3e-5
    )
    engine.end_sessions(asked[0].sessions)
    assert engine.sessions.bytes == 0


@pytest.mark.slow
def test_updates_come_at_any_time_and_soon(engine_of):
    """From another thread, while the engine never rests: it makes room between two steps, and loses nothing."""
    engine, by_version = engine_of(16), models("qwen3_vl")
    asked = [r for _ in range(6) for r in requests(4, replace(LONG, max_new_tokens=60))]
    futures = engine.submit(asked)
    steps = []
    decode = engine.batch.decode
    engine.batch.decode = lambda version: (steps.append(version), decode(version))
    for version in (1, 2):
        while not engine.batch.rows or len(steps) < 5 * version:
            time.sleep(0.001)
        engine.load_weights(weights_of(by_version[version]), version)
    done = [future.result(timeout=120) for future in futures]
    assert_explained(asked[:6], done[:6], by_version)
    assert steps.count(0) < 100 and steps.count(1) < 100, "an update had to wait for its turn"


def test_half_an_update_samples_nothing(engine_of, monkeypatch):
    """Its sender died, say: no token may be drawn by weights that never were. The next whole update goes on."""
    engine, by_version, asked = engine_of(), models("qwen3_vl", 2), requests(2)
    (stop,) = (stopping(engine, (5,), monkeypatch),)
    futures = engine.submit(asked)

    def half():
        yield from weights_of(by_version[1])[:9]
        raise ConnectionError("the sender is gone")

    next(stop)
    with pytest.raises(ConnectionError):
        engine.load_weights(half(), version=1)
    next(stop, None)  # resumes
    drawn = [len(row.ids) for row in engine.batch.rows]
    time.sleep(0.2)
    assert [len(row.ids) for row in engine.batch.rows] == drawn and engine.version == 0
    engine.load_weights(weights_of(by_version[1]), version=1)
    done = [future.result(timeout=60) for future in futures]
    assert_explained(asked, done, by_version)
