"""The real SGLang engine on the CPU, in float32, against transformers' own forward and the torch engine."""

import gc
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import torch
import zmq
from sglang_toy import drawing

from rlinf_vl.engines.base import EngineDied
from rlinf_vl.engines.make import warm_up
from rlinf_vl.engines.sglang import process
from rlinf_vl.engines.sglang.engine import SglangEngine
from rlinf_vl.engines.sglang.settings import Settings
from rlinf_vl.engines.sglang.shared_memory import FOLDER, LOADS, id_of, open_files
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model
from rlinf_vl.models.processing import Processor
from rlinf_vl.types import ImageRef, Request, SamplingParams
from rlinf_vl.weights.delta import Delta, patches

pytestmark = pytest.mark.integration
FAMILY = family_of("qwen3_vl")
TOLERANCE = 5e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(engine, toy, temperature):
    """0 to 3 images of different sizes, alone and as groups, all in one batch."""
    requests = [toy.request(k, n, temperature=temperature) for k in range(4) for n in (1, 3)]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        assert len(completion.samples) == len(request.seeds)
        for sample in completion.samples:
            assert sample.ids.dtype == np.int32 and sample.logprobs.dtype == np.float32
            assert sample.versions.tolist() == [0] * len(sample.ids)
            np.testing.assert_allclose(
                sample.logprobs, toy.of_tokens(request, sample, temperature), atol=TOLERANCE
            )


def test_images_matter(toy):
    """Or the test above would pass with a blind engine."""
    request, other = toy.request(1), toy.request(1, seed=1)
    sample_ids = np.arange(5, 10, dtype=np.int32)
    assert (toy.logp(request, sample_ids) - toy.logp(other, sample_ids))[
        :, ~toy.banned
    ].abs().max() > 0.05


def test_a_group_of_8_differs_and_ends_as_the_torch_engine_ends(engine, toy):
    request = toy.request(1, 8, max_new_tokens=60)
    samples = engine.generate([request])[0].samples
    assert len({tuple(s.ids.tolist()) for s in samples}) == 8
    eos = toy.processor.stop_ids[0]
    for sample in samples:
        assert (sample.ids[:-1] != eos).all()
        assert sample.finish_reason == ("stop" if sample.ids[-1] == eos else "length")
        assert sample.finish_reason == "stop" or len(sample.ids) == 60
        np.testing.assert_allclose(sample.logprobs, toy.of_tokens(request, sample), atol=TOLERANCE)


def test_a_stop_id_as_last_token_allowed_is_a_stop(engine, toy):
    first = int(
        engine.generate([toy.request(1, temperature=0.0, max_new_tokens=1)])[0].samples[0].ids[0]
    )
    request = toy.request(1, temperature=0.0, max_new_tokens=1, stop_ids=(first,))
    sample = engine.generate([request])[0].samples[0]
    assert sample.ids.tolist() == [first] and sample.finish_reason == "stop"


def test_greedy_ids_are_those_of_the_torch_engine(engine, toy):
    requests = [toy.request(k, 2, temperature=0.0, max_new_tokens=24) for k in range(4)]
    other = TorchEngine(
        load_model(toy.path, FAMILY, torch.float32),
        FAMILY,
        banned=toy.banned,
        pixels=toy.pixels,
        image_tokens=toy.processor.image_tokens,
        max_running=32,
    )
    try:
        expected = other.generate(requests)
    finally:
        other.close()
    for ours, theirs in zip(engine.generate(requests), expected, strict=True):
        for a, b in zip(ours.samples, theirs.samples, strict=True):
            assert a.ids.tolist() == b.ids.tolist() and a.finish_reason == b.finish_reason
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


def test_banned_ids_are_never_sampled(engine, toy):
    """At a temperature that makes all ids alike, 7 in 308 would be banned ones."""
    done = engine.generate(
        [toy.request(0, 32, temperature=100.0, max_new_tokens=60, seed=s) for s in range(2)]
    )
    ids = np.concatenate([s.ids for c in done for s in c.samples])
    assert len(ids) > 1000 and not toy.banned[ids].any()


def test_top_p_stays_within_the_nucleus_and_reports_the_logprob_before_it(engine, toy):
    for sampling in ({"top_p": 0.9, "temperature": 0.7}, {"top_k": 5}):
        request = toy.request(2, 32, max_new_tokens=1, **sampling)
        p = toy.logp(request, np.zeros(1, np.int32), sampling.get("temperature", 1.0))[0].exp()
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        kept = order[:5] if "top_k" in sampling else order[before < 0.9 + 1e-5]
        assert len(kept) < 0.95 * (p > 0).sum()
        for sample in engine.generate([request])[0].samples:
            assert int(sample.ids[0]) in kept.tolist()
            assert sample.logprobs[0] == pytest.approx(float(p[sample.ids[0]].log()), abs=TOLERANCE)


@pytest.mark.parametrize("part", ["visual", "language_model"])
def test_new_weights_are_followed_and_marked(engine, toy, part):
    """On images and prompts seen before: neither the vision cache nor the prefix cache may answer for the old weights."""
    requests = [toy.request(k, 2) for k in range(4)]
    engine.generate(requests)
    other, changed = toy.perturbed(part)
    names = list(changed)
    engine.load_weights(
        [{n: changed[n] for n in part} for part in (names[::2], names[1::2])], version=7
    )
    assert engine.version == 7
    moved = 0.0
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        for sample in completion.samples:
            assert (sample.versions == 7).all()
            expected = toy.of_tokens(request, sample, model=other)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
            moved = max(moved, float(np.abs(expected - toy.of_tokens(request, sample)).max()))
    assert moved > 0.05


@pytest.mark.parametrize("part", ["visual", "language_model"])
def test_some_values_of_weights_are_written_over(engine, toy, part):
    """SGLang fuses weights, and cuts others: the values that are not sent stay what they were."""
    _, changed = toy.perturbed(part)
    old, new = toy.weights(), {}
    for name, value in changed.items():
        new[name] = torch.where(torch.rand(value.shape) < 0.4, value, old[name])
    pieces = tuple((name, tuple(value.shape), 0, value.numel()) for name, value in new.items())
    before, after = (
        torch.cat([w[n].reshape(-1) for n in new]).view(torch.int32) for w in (old, new)
    )
    delta = Delta.between(before, after, number=0, base=0, dtype="float32", pieces=pieces)
    engine.load_weights(patches([delta], "cpu"), version=3)
    other, moved = toy.with_weights(new), 0.0
    for request in [toy.request(k, 2) for k in range(3)]:
        for sample in engine.generate([request])[0].samples:
            assert (sample.versions == 3).all()
            np.testing.assert_allclose(
                sample.logprobs, toy.of_tokens(request, sample, model=other), atol=1e-4
            )
            moved = max(
                moved, float(np.abs(sample.logprobs - toy.of_tokens(request, sample)).max())
            )
    assert moved > 0.01


def test_weights_change_in_the_middle_of_a_generation(engine, toy, endless):
    """Each token carries the weights that sampled it, and the old weights' cache serves no later request."""
    requests = [toy.request(1, 8, seed=s, max_new_tokens=400, stop_ids=()) for s in range(2)]
    other, changed = toy.perturbed("language_model")
    futures = engine.submit(requests)
    drawing(engine, 4)
    assert not any(f.done() for f in futures)
    engine.load_weights([changed], version=4)
    after = engine.submit([toy.request(1, 2, seed=0)])[0].result(60)
    spans = [s.versions for f in futures for s in f.result(120).samples]
    assert all((np.diff(v) >= 0).all() and set(v.tolist()) <= {0, 4} for v in spans)
    assert any(set(v.tolist()) == {0, 4} for v in spans)
    for sample in after.samples:
        expected = toy.of_tokens(toy.request(1, 2, seed=0), sample, model=other)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_wrong_weights_are_refused_and_the_engine_goes_on(engine, toy):
    with pytest.raises(ValueError, match="no such weight"):
        engine.load_weights([{"nonsense": torch.zeros(3)}], version=1)
    name = next(iter(toy.weights()))
    with pytest.raises(ValueError, match="does not fit"):
        engine.load_weights([{name: torch.zeros(3)}], version=1)
    engine.load_weights([toy.weights()], version=1)
    assert (engine.generate([toy.request(1)])[0].samples[0].versions == 1).all()


def test_a_bad_request_is_its_own_error(engine, toy):
    good, long = toy.request(1, 2), toy.request(1, max_new_tokens=500)
    blind = Request(good.ids, (), good.image_grids[:0], good.sampling, good.seeds)
    bad = ImageRef.of(b"no picture")
    broken = Request(good.ids, (bad,), good.image_grids, good.sampling, good.seeds)
    futures = engine.submit([good, broken, long, good, blind])
    with pytest.raises(Exception, match="image"):
        futures[1].result(60)
    with pytest.raises(ValueError, match="context of 512"):
        futures[2].result(60)
    with pytest.raises(ValueError, match="with 0 images has 1 runs of image placeholders"):
        futures[4].result(60)
    assert all(len(futures[i].result(60).samples) == 2 for i in (0, 3))


def test_exactly_the_context_fits(engine, toy):
    request = toy.request(1)
    request = toy.request(1, 1, max_new_tokens=512 - len(request.ids), stop_ids=())
    sample = engine.generate([request])[0].samples[0]
    assert sample.finish_reason == "stop" or len(sample.ids) == request.sampling.max_new_tokens


def test_pause_holds_and_resume_goes_on(engine, toy):
    futures = engine.submit([toy.request(1, 8, max_new_tokens=300)])
    time.sleep(0.2)
    engine.pause()
    futures += engine.submit([toy.request(0)])
    time.sleep(0.5)
    assert not futures[1].done()
    engine.resume()
    assert all(future.result(60).samples for future in futures)


def test_release_and_restore_memory(engine, toy, caplog):
    with caplog.at_level(logging.INFO, "rlinf_vl"):
        engine.release_memory()
    assert "frees none" in caplog.text
    engine.restore_memory()
    request = toy.request(1)
    sample = engine.generate([request])[0].samples[0]
    np.testing.assert_allclose(sample.logprobs, toy.of_tokens(request, sample), atol=TOLERANCE)


def test_timeout_and_cancellation_abort(engine, toy, monkeypatch, endless):
    monkeypatch.setattr(engine.requests, "timeout_s", 0.1)
    timed = engine.submit([toy.request(1, 16, max_new_tokens=450)])[0]
    with pytest.raises(TimeoutError, match="0.1 s"):
        timed.result(30)
    monkeypatch.setattr(engine.requests, "timeout_s", 60)
    cancelled = engine.submit([toy.request(1, 16, max_new_tokens=450)])[0]
    drawing(engine, 4)
    assert cancelled.cancel()
    engine.release_memory()  # waits until SGLang is idle, and fails if it never is
    engine.restore_memory()
    assert engine.generate([toy.request(1)])[0].samples


def test_nothing_more_is_sampled_for_a_request_that_is_cancelled(engine, toy, monkeypatch, endless):
    """The scheduler's own count of the tokens of each sample: those of a cancelled request end where they were."""
    manager, outcomes = engine.host.manager, []
    receive = manager._handle_batch_output

    async def noted(message):
        for reason, tokens in zip(message.finished_reasons, message.completion_tokens, strict=True):
            if reason is not None:
                outcomes.append((reason["type"], tokens))
        await receive(message)

    monkeypatch.setattr(manager, "_handle_batch_output", noted)
    n_tokens = 450
    cancelled, kept = engine.submit(
        [toy.request(1, n, seed=n, max_new_tokens=n_tokens) for n in (4, 1)]
    )
    drawing(engine, 5)
    engine.pause()
    assert cancelled.cancel()
    engine.resume()
    assert len(kept.result(120).samples[0].ids) == n_tokens
    aborted = [tokens for reason, tokens in outcomes if reason == "abort"]
    assert len(aborted) == 4 and max(aborted) < n_tokens, outcomes
    assert outcomes.count(("length", n_tokens)) == 1, outcomes


def test_more_requests_than_fit_at_once(engine, toy):
    requests = [toy.request(k % 2, 4, seed=k, max_new_tokens=4) for k in range(40)]
    assert all(len(c.samples) == 4 for c in engine.generate(requests))
    assert engine.requests.in_flight == 0


@pytest.fixture
def sent(engine, monkeypatch):
    """Sizes of the messages that SGLang sends to its scheduler, in bytes."""
    from sglang.srt.managers import tokenizer_manager

    sizes, send = [], tokenizer_manager.sock_send

    def measured(socket, message, *flags):
        sizes.append(len(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)))
        send(socket, message, *flags)

    monkeypatch.setattr(tokenizer_manager, "sock_send", measured)
    return sizes


def test_a_groups_pixels_are_not_in_its_messages(engine, toy, sent):
    """8 samples of 4 images: in SGLang's own way 9 messages carry 4 times all pixels each."""
    images = tuple(toy.image(np.random.default_rng(i), (96, 96)) for i in range(4))
    request = toy.request(images, 8, max_new_tokens=2)
    pixels = sum(toy.pixels(image).nbytes for image in images)
    samples = engine.generate([request])[0].samples
    assert len(sent) == 1 + 8
    assert sum(sent) < 2e6 < 9 * 4 * pixels
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs, toy.of_tokens(request, sample), atol=1e-5)


def test_an_image_is_told_from_another_of_its_size_and_found_again(engine, toy):
    """Images stand in SGLang's prefix cache by the identity that we give them: not by their pixels."""
    rng = np.random.default_rng(7)
    one, other = toy.image(rng), toy.image(rng)
    for images in [(one, other), (other, one), (one, one), (one, other)]:
        request = toy.request(images, 2)
        for sample in engine.generate([request])[0].samples:
            np.testing.assert_allclose(
                sample.logprobs, toy.of_tokens(request, sample), atol=TOLERANCE
            )


def test_pixels_are_held_until_a_request_is_answered_or_given_up(engine, toy):
    def held():
        return sum(file.holds for file in engine.requests.pixels._files)

    assert engine.generate([toy.request(2, 2, seed=s) for s in range(3)])
    assert not held()
    futures = engine.submit([toy.request(2, 4, seed=s, max_new_tokens=400) for s in range(3)])
    while not held():
        time.sleep(0.01)
    for future in futures:
        future.cancel()
    until = time.monotonic() + 60
    while held() and time.monotonic() < until:
        time.sleep(0.05)
    assert not held()
    assert engine.generate([toy.request(1)])[0].samples


def test_the_warm_up_samples_in_each_way_with_an_image_and_without(engine, toy, monkeypatch):
    seen = []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda requests: seen.extend(requests) or submit(requests)
    )
    ways = [
        SamplingParams(temperature=0.7, stop_ids=(5,)),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9),
    ]
    warm_up(engine, toy.renderer.prompt, ways, longest=512)
    kinds = {(r.sampling.temperature, r.sampling.top_p, len(r.images), len(r.seeds)) for r in seen}
    assert kinds == {
        (t, p, i, n)
        for t, p in ((0.7, 1.0), (0.0, 1.0), (1.0, 0.9))
        for i in (0, 1)
        for n in (1, 2)
    }
    assert all(r.sampling.max_new_tokens == 2 and not r.sampling.stop_ids for r in seen)


def test_the_process_stays_ours(engine):
    """SGLang changes logging and the start method for the whole process, and dies by a child's SIGQUIT: not here."""
    os.kill(os.getpid(), signal.SIGQUIT)
    assert multiprocessing.get_start_method(allow_none=True) != "spawn"
    assert any("pytest" in type(h).__module__ for h in logging.getLogger().handlers)


def test_the_deterministic_option_needs_a_gpu(toy):
    with pytest.raises(ValueError, match="deterministic.*GPU"):
        settings = Settings(
            model_path=toy.path, context_length=64, max_running=1, deterministic=True
        )
        image_tokens = toy.processor.image_tokens
        SglangEngine(
            settings, FAMILY, banned=toy.banned, pixels=toy.pixels, image_tokens=image_tokens
        )


def open_contexts() -> list[zmq.Context]:
    """The contexts of ZeroMQ in this process, which wait for their sockets when they are collected."""
    contexts = (thing for thing in gc.get_objects() if issubclass(type(thing), zmq.Context))
    return [context for context in contexts if not context.closed]


def test_an_engine_that_can_not_start_says_so_and_leaves_nothing(engine, toy, tmp_path):
    shutil.copytree(toy.path, tmp_path / "broken", ignore=shutil.ignore_patterns("*.safetensors"))
    before, contexts = set(multiprocessing.active_children()), open_contexts()
    with pytest.raises(EngineDied, match="did not start"):
        settings = Settings(
            model_path=str(tmp_path / "broken"),
            context_length=64,
            max_running=1,
            dtype=torch.float32,
        )
        image_tokens = toy.processor.image_tokens
        SglangEngine(
            settings, FAMILY, banned=toy.banned, pixels=toy.pixels, image_tokens=image_tokens
        )
    assert set(multiprocessing.active_children()) == before
    assert {id(context) for context in open_contexts()} <= {id(context) for context in contexts}
    assert engine.generate([toy.request(1)])[0].samples


def test_a_stopped_scheduler_is_not_alive(running):
    assert running.alive()
    for pid in running.host.processes.pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert not running.alive(timeout_s=1.0)
    finally:
        for pid in running.host.processes.pids:
            os.kill(pid, signal.SIGCONT)
    assert running.alive()


def test_a_killed_scheduler_fails_what_is_pending_and_close_leaves_nothing(
    running, toy, endless, monkeypatch
):
    """The last test: the engine does not survive it. Its loop is blocked when it is closed."""
    pids = running.host.processes.pids
    futures = running.submit([toy.request(1, 8, seed=s, max_new_tokens=450) for s in range(8)])
    drawing(running, 4)
    scheduler = next(p for p in pids if "scheduler" in " ".join(psutil.Process(p).cmdline()))
    os.kill(scheduler, signal.SIGKILL)
    start = time.monotonic()
    for future in futures:
        with pytest.raises(EngineDied, match="died"):
            future.result(15)
    assert time.monotonic() - start < 10
    assert not running.alive()
    for use in (
        lambda: running.submit([toy.request(0)]),
        running.pause,
        lambda: running.load_weights([{}], 1),
    ):
        with pytest.raises(EngineDied):
            use()
    blocked, start = threading.Event(), time.monotonic()
    monkeypatch.setattr(process, "CLOSE_TIMEOUT_S", 1.0)
    running.host.loop.call_soon_threadsafe(blocked.wait)
    running.close()
    assert time.monotonic() - start < 60
    blocked.set()
    mine = [
        path.name
        for path in FOLDER.glob(f"{LOADS}*")
        if id_of(path.stat()) in open_files(os.getpid())
    ]
    assert mine == [], "closed, an engine leaves its file of load figures"
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("both", [False, True])
def test_a_response_ends_where_sglang_would_end_it(toy, tmp_path, both):
    """SGLang stops at the end ids of the checkpoint, whatever a request says: the processor's are the same."""
    from sglang.srt.configs.model_config import ModelConfig

    folder = shutil.copytree(toy.path, tmp_path / "checkpoint")
    generation = json.loads((folder / "generation_config.json").read_text())
    end, text_end = toy.processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    ids = [end, text_end] if both else end
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": ids}))
    assert ModelConfig(str(folder)).hf_eos_token_id == set(Processor(folder, FAMILY).stop_ids)
