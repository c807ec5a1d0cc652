"""Weights that SGLang takes while requests run: each token is explained by the version that it says sampled it."""

import copy
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from sglang_toy import drawing

from rlinf_vl.types import Request

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("endless")]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def versions(toy):
    """Weights 1 and 2, the second with another tower too, and transformers' models of versions 0 to 2."""
    _, one = toy.perturbed("language_model", scale=0.1)
    two = (
        toy.perturbed("language_model", scale=0.1, seed=4)[1]
        | toy.perturbed("visual", scale=0.5)[1]
    )
    return [one, two], [toy.model, toy.with_weights(one), toy.with_weights(one | two)]


def explained(toy, models, request, sample):
    """Logprobs of a full forward by the weights that sampled each token."""
    tables = np.stack([toy.of_tokens(request, sample, model=model) for model in models])
    return tables[sample.versions, np.arange(len(sample.ids))]


def updated(engine, requests, weights, pause_s=0.1):
    """Answers to requests, with these weights loaded one after the other while they are drawn."""
    futures = engine.submit(requests)
    drawing(engine, 4)
    for version, changed in enumerate(weights, 1):
        time.sleep(pause_s)
        engine.load_weights([changed], version=version)
    return [future.result(120) for future in futures]


def test_requests_go_on_by_the_new_weights(engine, toy, versions):
    """Groups with images and without, alone and together; more than SGLang decodes at once, so that some have not begun."""
    weights, models = versions
    requests = [
        toy.request(k % 3, n, seed=k, max_new_tokens=250, stop_ids=())
        for k, n in enumerate([8, 1, 4, 8, 8, 8, 8])
    ]
    done = updated(engine, requests, weights)
    seen = set()
    for request, completion in zip(requests, done, strict=True):
        assert len(completion.samples) == len(request.seeds)
        for sample in completion.samples:
            assert (np.diff(sample.versions) >= 0).all()
            expected = explained(toy, models, request, sample)
            np.testing.assert_allclose(sample.logprobs, expected, atol=TOLERANCE)
            assert (sample.finish_reason, len(sample.ids)) == ("length", 250)
            seen.add(tuple(np.unique(sample.versions).tolist()))
    assert any(len(s) > 1 for s in seen) and any(2 in s for s in seen), seen
    assert engine.requests.in_flight == engine.requests.unanswered_messages == 0


def test_a_later_turn_goes_on_behind_tokens_of_several_versions(engine, toy, versions):
    """The second turn shows a new image and is itself interrupted, while the engine is held."""
    weights, models = versions
    first = [toy.request(2, seed=40 + k, max_new_tokens=160, stop_ids=()) for k in range(6)]
    done = updated(engine, first, weights[:1])
    second = []
    for k, (request, completion) in enumerate(zip(first, done, strict=True)):
        more = toy.request(1, seed=60 + k, max_new_tokens=160, stop_ids=())
        parts = zip(
            (request.ids, request.images, request.image_grids),
            (more.ids, more.images, more.image_grids),
            strict=True,
        )
        (ids, more_ids), (images, new), (grids, new_grids) = parts
        ids = np.concatenate([ids, completion.samples[0].ids, more_ids])
        second.append(
            Request(ids, images + new, np.concatenate([grids, new_grids]), more.sampling, (k,))
        )
    futures = engine.submit(second)
    drawing(engine, 4)
    engine.pause()
    engine.load_weights([weights[1]], version=2)
    time.sleep(0.3)
    assert not any(future.done() for future in futures), (
        "the update has ended a pause that was not its own"
    )
    engine.resume()
    again = [future.result(120) for future in futures]
    for request, completion in zip([*first, *second], [*done, *again], strict=True):
        (sample,) = completion.samples
        np.testing.assert_allclose(
            sample.logprobs, explained(toy, models, request, sample), atol=TOLERANCE
        )
    assert {1, 2} <= {int(v) for completion in again for v in completion.samples[0].versions}


def test_half_an_update_samples_nothing(engine, toy, versions):
    weights, models = versions
    request = toy.request(1, 4, seed=80, max_new_tokens=250, stop_ids=())

    def half():
        yield dict(list(weights[0].items())[:5])
        raise ConnectionError("the sender is gone")

    (future,) = engine.submit([request])
    drawing(engine, 4)
    with pytest.raises(ConnectionError):
        engine.load_weights(half(), version=1)
    time.sleep(0.3)
    assert not future.done() and engine.version == 0
    engine.load_weights([weights[0]], version=1)
    for sample in future.result(120).samples:
        assert set(sample.versions) == {0, 1}
        np.testing.assert_allclose(
            sample.logprobs, explained(toy, models[:2], request, sample), atol=TOLERANCE
        )


def test_kept_tokens_are_those_of_decoding_with_swapped_weights(engine, toy, versions, monkeypatch):
    """Against transformers' incremental decoding, whose weights are swapped where the versions say it; then in a second turn, for
    which nothing of the first is computed again."""
    weights, models = versions
    settings = replace(engine.settings, keep_kv=True)
    for part in (engine, engine.requests):
        monkeypatch.setattr(part, "settings", settings)
    request = toy.request(1, 8, seed=90, max_new_tokens=250, stop_ids=())
    request = replace(request, sessions=tuple(f"kept {i}" for i in range(8)))
    (done,) = updated(engine, [request], weights[:1])
    swapped = [i for i, sample in enumerate(done.samples) if set(sample.versions) == {0, 1}]
    assert swapped
    shown = [5, 6, 7]
    seconds = [
        replace(
            request,
            ids=np.concatenate([request.ids, done.samples[i].ids, np.array(shown, np.int32)]),
            sampling=replace(request.sampling, max_new_tokens=20),
            seeds=(i,),
            sessions=(f"kept {i}",),
        )
        for i in swapped[:2]
    ]
    model = copy.deepcopy(toy.model)
    for second, i, answer in zip(seconds, swapped[:2], engine.generate(seconds), strict=True):
        model.model.rope_deltas = None
        new = torch.from_numpy(request.ids)[None].long()
        inputs = {
            "pixel_values": torch.from_numpy(toy.pixels(request.images[0])),
            "image_grid_thw": torch.from_numpy(request.image_grids.astype(np.int64)),
            "mm_token_type_ids": (new == toy.processor.image_token_id).int(),
        }
        past = None
        for before, sample in (([], done.samples[i]), (shown, answer.samples[0])):
            new = new if past is None else torch.tensor([[*new[0].tolist(), *before]])
            for t, (token, version) in enumerate(
                zip(sample.ids.tolist(), sample.versions.tolist(), strict=True)
            ):
                model.load_state_dict(models[version].state_dict())
                with torch.no_grad():
                    out = model(input_ids=new, past_key_values=past, use_cache=True, **inputs)
                logits = out.logits[0, -1].float()
                logits[torch.from_numpy(toy.banned)] = -torch.inf
                assert abs(float(logits.log_softmax(-1)[token]) - sample.logprobs[t]) < TOLERANCE, (
                    t,
                    version,
                )
                past, inputs, new = out.past_key_values, {}, torch.tensor([[token]])
        whole = toy.of_tokens(second, answer.samples[0], model=models[1])
        assert np.abs(whole - answer.samples[0].logprobs).max() > 10 * TOLERANCE, (
            "then there is nothing to tell apart"
        )
    engine.end_sessions(request.sessions)
    assert not engine.requests.session_updates


def test_a_session_that_ends_before_its_request_is_sent_stays_ended(engine, toy, monkeypatch):
    """An agent of a group may fail while the group's first request, which others share, waits for an update."""
    settings = replace(engine.settings, keep_kv=True)
    for part in (engine, engine.requests):
        monkeypatch.setattr(part, "settings", settings)
    request = replace(toy.request(1, 2, seed=95), sessions=("failed", "alive"))
    engine.pause()
    futures = engine.submit([request])
    engine.end_sessions(["failed"])
    engine.resume()
    assert len(futures[0].result(120).samples) == 2
    assert engine.requests.session_updates == {"alive": engine.requests.updates}
    engine.end_sessions(["alive"])
    assert not engine.requests.session_updates
