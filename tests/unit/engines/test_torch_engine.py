"""The torch engine against transformers' `generate` and `forward`."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import (
    EOS,
    IMAGE_ID,
    PAD,
    VOCAB,
    answered,
    banned,
    pixels,
    tiny_model,
    transformers_logprobs,
)
from tiny import request as tiny_request

from rlinf_vl.controller.mismatch import Score, judge
from rlinf_vl.engines.torch import batch
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import part_of
from rlinf_vl.types import Sample, SamplingParams

#: Those whose rows have states of their own, beside one that has keys and values only.
FAMILIES = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")


def prompts():
    rng = np.random.default_rng(1)
    shapes = [[(2, 3)], [], [(1, 1), (3, 2), (2, 2)], [(2, 2)], []]
    return [tiny_request(rng, shape) for shape in shapes]


def request(g, n, seed=0, **sampling):
    return replace(
        g, sampling=SamplingParams(stop_ids=(EOS,), **sampling), seeds=tuple(range(seed, seed + n))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_generate(engine_of, family):
    engine, model = engine_of(family=family), tiny_model(family=family)
    done = engine.generate([request(g, 2, temperature=0.0, max_new_tokens=12) for g in prompts()])
    for g, completion in zip(prompts(), done, strict=True):
        ids = torch.from_numpy(g.ids)[None].long()
        inputs = {}
        if g.images:
            inputs = {
                "pixel_values": torch.from_numpy(np.concatenate([pixels(i) for i in g.images])),
                "image_grid_thw": torch.from_numpy(g.image_grids.astype(np.int64)),
                "mm_token_type_ids": (ids == IMAGE_ID).int(),
            }
        model.model.rope_deltas = None
        expected = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=EOS,
            pad_token_id=PAD,
            suppress_tokens=np.flatnonzero(banned()).tolist(),
            **inputs,
        )[0, ids.shape[1] :]
        for sample in completion.samples:
            assert sample.ids.tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_running", [5, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_sampling_distribution(
    engine_of, temperature, max_running, family
):
    """With 5 places for 4 samples each, slots are refilled; nothing may change by it."""
    engine, model = engine_of(max_running, family), tiny_model(family=family)
    done = engine.generate(
        [
            request(g, 4, seed=10 * i, temperature=temperature, max_new_tokens=10)
            for i, g in enumerate(prompts())
        ]
    )
    for g, completion in zip(prompts(), done, strict=True):
        for sample in completion.samples:
            assert not banned()[sample.ids].any()
            assert len(sample.ids) == 10 or sample.ids[-1] == EOS
            assert (sample.ids[:-1] != EOS).all()
            expected = transformers_logprobs(model, answered(g, [sample]), 0, temperature)
            np.testing.assert_allclose(sample.logprobs, expected.detach().numpy(), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_what_is_sampled_does_not_depend_on_the_company(engine_of, family):
    requests = [request(g, 3, seed=7 * i, max_new_tokens=9) for i, g in enumerate(prompts())]
    together = engine_of(64, family).generate(requests)
    crowded = engine_of(4, family).generate(requests)
    alone = [engine_of(64, family).generate([r])[0] for r in requests]
    for a, b, c in zip(together, crowded, alone, strict=True):
        for x, y, z in zip(a.samples, b.samples, c.samples, strict=True):
            assert x.ids.tolist() == y.ids.tolist() == z.ids.tolist()


def test_lengths_and_reasons_of_mixed_requests(engine_of):
    g = prompts()
    done = engine_of().generate(
        [request(g[0], 3, max_new_tokens=1), request(g[1], 2, max_new_tokens=30)]
    )
    assert [len(s.ids) for s in done[0].samples] == [1, 1, 1]
    for sample in done[1].samples:
        assert sample.finish_reason == ("stop" if sample.ids[-1] == EOS else "length")


def test_a_rows_state_takes_its_room(engine_of, monkeypatch):
    """By its keys and values alone a row would be admitted four times."""
    engine, admitted = engine_of(family="qwen3_5"), []
    g, begin, state = prompts()[1], engine.batch.begin, engine.batch.decode_state
    of_tokens = (len(g.ids) + 5) * state.token_bytes(torch.float32)
    room = 2 * (of_tokens + state.row_bytes())
    assert room >= 4 * of_tokens
    monkeypatch.setattr(engine, "_free_bytes", lambda: room)
    monkeypatch.setattr(
        engine.batch, "begin", lambda pending, v: (admitted.append(len(pending)), begin(pending, v))
    )
    futures = engine.submit([request(g, 1, seed, max_new_tokens=5) for seed in range(6)])
    assert all(len(future.result(timeout=60).samples) == 1 for future in futures)
    assert admitted[0] == 2


@pytest.mark.parametrize(("lacking", "together"), [(0, 2), (1, 1)])
def test_one_prefill_has_a_bounded_number_of_tokens(engine_of, monkeypatch, lacking, together):
    engine, admitted, g = engine_of(), [], prompts()[1]
    begin = engine.batch.begin
    limit = 2 * len(g.ids) - lacking
    monkeypatch.setattr("rlinf_vl.engines.torch.engine.PREFILL_TOKENS", limit)
    monkeypatch.setattr(
        engine.batch, "begin", lambda pending, v: (admitted.append(len(pending)), begin(pending, v))
    )
    futures = engine.submit([request(g, 1, seed, max_new_tokens=1) for seed in range(4)])
    assert all(len(future.result(timeout=60).samples) == 1 for future in futures)
    assert admitted == [together] * (4 // together)


def first_token_probabilities(g):
    """[VOCAB]: what transformers gives each token to begin with, banned ones left out."""
    p = np.zeros(VOCAB)
    for token in np.flatnonzero(~banned()):
        one = answered(
            g, [Sample(np.array([token]), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")]
        )
        p[token] = transformers_logprobs(tiny_model(), one, 0).detach().exp()
    return p


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.5, "temperature": 0.8}]
)
def test_truncated_sampling_agrees_with_the_trainer(engine_of, sampling):
    """Top-k and top-p choose what is drawn. The logprobs are the trainer's, so the mismatch guard has nothing to stop for."""
    g = prompts()[0]
    done = engine_of(400).generate([request(g, 400, max_new_tokens=4, **sampling)])[0]
    temperature = sampling.get("temperature", 1.0)
    p = first_token_probabilities(g) ** (1 / temperature)
    p /= p.sum()
    order = p.argsort()[::-1]
    kept = order[(p[order].cumsum() - p[order] < sampling.get("top_p", 1.0))][
        : sampling.get("top_k")
    ]
    assert {int(s.ids[0]) for s in done.samples} == set(kept.tolist())
    differences = [
        np.abs(
            s.logprobs
            - transformers_logprobs(tiny_model(), answered(g, [s]), 0, temperature).detach().numpy()
        )
        for s in done.samples[:8]
    ]
    scores = [Score(1, len(d), float(d.sum()), 9.0) for d in differences]
    assert judge(scores, "fp32")["mismatch/one_image"] < 2e-5


def test_samples_follow_the_distribution(engine_of):
    g, n = prompts()[3], 4000
    done = engine_of(4096).generate([request(g, n, max_new_tokens=1)])[0]
    counts = np.bincount([int(s.ids[0]) for s in done.samples], minlength=VOCAB)
    p = first_token_probabilities(g)
    assert counts[p == 0].sum() == 0
    often = p * n >= 5

    def excess(counts):
        """Pearson's χ² in standard deviations above its mean; what is too rare for it counts as one token."""
        seen, expected = (np.append(x[often], x[~often].sum()) for x in (counts, p * counts.sum()))
        chi2 = ((seen - expected) ** 2 / expected).sum()
        return (chi2 - often.sum()) / np.sqrt(2 * often.sum())

    assert excess(counts) < 4
    without_likeliest = np.where(p == p.max(), 0, counts)
    assert excess(without_likeliest) > 20, (
        "an engine that never draws the likeliest token must not pass"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_used_and_marked(engine_of, family):
    engine, other = engine_of(family=family), tiny_model(seed=5, family=family)
    g = prompts()[0]
    engine.load_weights([{name: p.detach() for name, p in other.named_parameters()}], version=3)
    sample = engine.generate([request(g, 1, max_new_tokens=6)])[0].samples[0]
    assert (sample.versions == 3).all()
    expected = transformers_logprobs(other, answered(g, [sample]), 0)
    np.testing.assert_allclose(sample.logprobs, expected.detach().numpy(), atol=2e-5)


def test_wrong_weights_are_refused(engine_of):
    with pytest.raises(ValueError, match="no such weight"):
        engine_of().load_weights([{"nonsense": torch.zeros(3)}], version=1)


def test_pause_holds_and_resume_goes_on(engine_of):
    engine = engine_of()
    engine.pause()
    future = engine.submit([request(prompts()[0], 1, max_new_tokens=3)])[0]
    threading.Event().wait(0.3)
    assert not future.done()
    engine.resume()
    assert len(future.result(timeout=30).samples) == 1


def test_an_engine_that_makes_no_step_is_not_alive_until_it_goes_on(engine_of, monkeypatch):
    engine = engine_of()
    decode, wedged, may_go_on = engine.batch.decode, threading.Event(), threading.Event()

    def hang(version):
        wedged.set()
        assert may_go_on.wait(60)
        decode(version)

    monkeypatch.setattr(engine.batch, "decode", hang)
    future = engine.submit([request(prompts()[0], 1, max_new_tokens=3)])[0]
    assert wedged.wait(60)
    assert engine.alive(3600), "a step may take its time"
    wait_until(lambda: not engine.alive(0.01))
    # Waits for the step, and changes nothing.
    sync = threading.Thread(target=engine.load_weights, args=([], 1))
    sync.start()
    wait_until(lambda: engine._threads_waiting)
    engine.submit([request(prompts()[1], 1, max_new_tokens=3)])
    assert not engine.alive(0.01)
    may_go_on.set()
    sync.join(60)
    future.result(60)
    wait_until(lambda: not engine.batch.rows or all(row.done for row in engine.batch.rows))
    wait_until(lambda: engine.alive(0.01))


def test_an_engine_without_work_is_alive_however_long_that_lasts(engine_of):
    engine, long_ago = engine_of(), -1e9
    engine._progress = long_ago
    assert engine.alive(0.01)
    engine.pause()
    future = engine.submit([request(prompts()[0], 1, max_new_tokens=3)])[0]
    engine._progress = long_ago
    assert engine.alive(0.01)
    engine.resume()
    assert engine.alive(3600) and future.result(60)


def test_each_layer_of_a_long_step_is_progress(engine_of):
    engine, seen = engine_of(), []
    first, second = engine.batch.text_model.layers[:2]

    def begin_long_ago(*_):
        engine._progress = -1e9

    first.register_forward_pre_hook(begin_long_ago)
    second.register_forward_pre_hook(lambda *_: seen.append(engine.alive(3600)))
    (completion,) = engine.generate([request(prompts()[0], 1, max_new_tokens=3)])
    assert len(seen) == len(completion.samples[0].ids) and all(seen)


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_nothing_more_is_sampled_for_a_request_that_is_cancelled(engine_of, monkeypatch):
    """Of three requests one is cancelled while it is sampled and one while it waits for a row; the other is answered whole."""
    engine = engine_of(max_running=4)
    decode, steps = engine.batch.decode, []
    reached, may_go_on = threading.Event(), threading.Event()

    def decode_and_hold(version):
        decode(version)
        steps.append(len(engine.batch.rows))
        if len(steps) == 3:
            reached.set()
            assert may_go_on.wait(60)

    monkeypatch.setattr(engine.batch, "decode", decode_and_hold)
    endless = SamplingParams(max_new_tokens=30)
    asked = [replace(g, sampling=endless, seeds=(0, 1)) for g in prompts()[:3]]
    kept, cancelled, waiting = engine.submit(asked)
    assert reached.wait(60)
    given_up = [row for row in engine.batch.rows if row.pending.future is cancelled]
    assert [len(row.ids) for row in given_up] == [4, 4]
    assert cancelled.cancel() and waiting.cancel()
    may_go_on.set()
    assert [len(sample.ids) for sample in kept.result(60).samples] == [30, 30]
    assert [len(row.ids) for row in given_up] == [4, 4], (
        "tokens were sampled after the cancellation"
    )
    assert steps[:28] == [4] * 3 + [2] * 25, (
        "rows of a cancelled request were computed, or one that waited was begun"
    )


def test_an_engine_that_sleeps_is_not_asked_to_generate(engine_of):
    """Also where releasing frees nothing: a run that forgets to restore its engines would only fail on a GPU."""
    engine, asked = engine_of(), [request(prompts()[0], 2, max_new_tokens=6)]
    fresh = engine.generate(asked)[0].samples
    engine.restore_memory()  # nothing was released
    engine.release_memory()
    pages = engine.batch.cache.prompts, engine.batch.cache.continuations
    assert not any(part.nbytes for pool in pages for part in (pool._keys, pool._values)), (
        "pages stay for nobody"
    )
    with pytest.raises(AssertionError, match="kv_cache.*weights"):
        engine.submit(asked)
    new = [{name: p.detach() for name, p in tiny_model().named_parameters()}]
    with pytest.raises(AssertionError, match="load weights while"):
        engine.load_weights(new, version=1)
    engine.restore_memory(["weights"])
    engine.load_weights(new, version=1)
    with pytest.raises(AssertionError, match="kv_cache"):
        engine.submit(asked)
    engine.restore_memory(["weights", "kv_cache"])
    again = engine.generate(asked)[0].samples
    assert [s.ids.tolist() for s in again] == [s.ids.tolist() for s in fresh]


def test_an_image_that_fails_is_its_own_requests_error(engine_of):
    g = prompts()

    def broken(image):
        if image.hash == g[0].images[0].hash:
            raise ValueError("truncated")
        return pixels(image)

    futures = engine_of(pixels=broken).submit([request(x, 1, max_new_tokens=3) for x in g])
    with pytest.raises(ValueError, match="truncated"):
        futures[0].result(timeout=30)
    assert all(len(f.result(timeout=30).samples) == 1 for f in futures[1:])


def test_closing_fails_what_is_unfinished(engine_of):
    engine = engine_of()
    engine.pause()
    future = engine.submit([request(prompts()[0], 1)])[0]
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        future.result(timeout=5)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_an_image_goes_through_the_tower_once_until_the_tower_changes(
    engine_of, family, monkeypatch
):
    """Shown twice by one request, by another beside it and by one behind it; and what is sampled is what transformers says."""
    engine, model, seen = engine_of(family=family), tiny_model(family=family), []
    encode = batch.encode_images
    monkeypatch.setattr(
        batch, "encode_images", lambda *args: seen.append(len(args[3])) or encode(*args)
    )
    one = tiny_request(np.random.default_rng(3), [(2, 3)])
    twice = replace(
        one,
        ids=np.concatenate([one.ids, one.ids]),
        images=one.images * 2,
        image_grids=np.concatenate([one.image_grids, one.image_grids]),
    )
    asked = [request(g, 2, max_new_tokens=4) for g in (one, twice)]

    def right(completions):
        for g, completion in zip(asked, completions, strict=False):
            for sample in completion.samples:
                expected = transformers_logprobs(model, answered(g, [sample]), 0, 1.0)
                np.testing.assert_allclose(sample.logprobs, expected.detach().numpy(), atol=2e-5)

    right(engine.generate(asked))
    right(engine.generate(asked[:1]))
    assert seen == [1]
    # How often the image was encoded, when weights of each have come.
    times = {"language_model": 1, "projector": 2, "vision_tower": 3}
    for version, part in enumerate(times, 1):
        weights = {
            name: p
            for name, p in model.named_parameters()
            if part_of(name, family_of(family)) == part
        }
        with torch.no_grad():
            for p in weights.values():
                p.mul_(1.1)
        engine.load_weights([weights], version)
        right(engine.generate(asked))
        assert seen == [1] * times[part]
