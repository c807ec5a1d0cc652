"""Sliding windows and image blocks in the torch engine: against PyTorch's own attention over whole sequences with an explicit
mask, and a Gemma 3 over several turns against transformers' forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from rlinf_vl.engines.torch.decode import DecodeCache
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.engines.torch.prefill import PrefillAttention
from rlinf_vl.engines.torch.prefix_cache import CachedPrefix
from rlinf_vl.models.families import family_at
from rlinf_vl.models.shapes import DecodeState
from rlinf_vl.tools.verify.prove.main import RELEASED
from rlinf_vl.tools.verify.prove.member import member_of
from rlinf_vl.tools.verify.prove.problems import SIZES, answered, random_request
from rlinf_vl.tools.verify.prove.reference import logprobs_of, pixels_of
from rlinf_vl.types import SamplingParams

HEADS, KV_HEADS, D, SCALE = 4, 2, 8, 0.3
CPU = torch.device("cpu")
STATE = DecodeState((0,), KV_HEADS, D)


def attention(q, k, v, mask):
    """[L, H, D] of q [L, H, D] over k and v [U, H_kv, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return out.transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 4, 12, 33, 100])
@pytest.mark.parametrize("with_images", [False, True])
def test_prefill_behind_cached_prefixes(window, with_images):
    torch.manual_seed(0)
    cached, new = [0, 0, 9, 30, 3], [12, 1, 5, 8, 20]
    prefixes = [
        CachedPrefix(np.zeros(n, np.int32), (), (torch.randn(1, 2, n, KV_HEADS, D),)) if n else None
        for n in cached
    ]
    bounds = np.cumsum([0, *new])
    runs = np.array([[2, 7], [bounds[2], bounds[2] + 3], [bounds[4] + 6, bounds[4] + 18]])
    context = PrefillAttention(
        STATE, prefixes, new, torch.float32, CPU, runs if with_images else None
    )
    q = torch.randn(1, HEADS, bounds[-1], D)
    k, v = torch.randn(2, 1, KV_HEADS, bounds[-1], D)
    out = context.attend(0, q, k, v, SCALE, window)[0]
    for i, (prefix, n) in enumerate(zip(cached, new, strict=True)):
        rows = slice(bounds[i], bounds[i + 1])
        keys, values = (x[0, :, rows].transpose(0, 1) for x in (k, v))
        if prefix:
            keys, values = (
                torch.cat([old, x])
                for old, x in zip(prefixes[i].parts[0][0], (keys, values), strict=True)
            )
        place = torch.arange(prefix + n)
        mask = place <= place[:, None]
        for start, end in runs - bounds[i] + prefix if with_images else ():
            if prefix <= start < prefix + n:
                mask[start:end, start:end] = True
        if window is not None:
            mask &= place > place[:, None] - window
        expected = attention(q[0, :, rows].transpose(0, 1), keys, values, mask[prefix:])
        torch.testing.assert_close(out[rows], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 5, 17, 40, 500])
def test_decoding_within_a_window(window):
    """Prompts of several lengths and samples, of several pages and one; rows go meanwhile."""
    torch.manual_seed(0)
    lengths, samples = [5, 40, 70], [3, 1, 2]
    tokens = torch.randn(1, 2, sum(lengths) + 4, KV_HEADS, D)
    sequences = list(torch.randperm(sum(lengths) + 4)[: sum(lengths)].split(lengths))
    cache = DecodeCache(STATE, torch.float32, CPU)
    cache.append(tokens, sequences, lengths, samples, {})
    rows = [
        [tokens[0, kind, sequences[i]] for kind in range(2)]
        for i, n in enumerate(samples)
        for _ in range(n)
    ]
    for step in range(50):
        if step in (9, 30):
            keep = [i for i in range(len(rows)) if i != 1]
            cache.keep(torch.tensor(keep))
            rows = [rows[i] for i in keep]
        cache.begin_step()
        q = torch.randn(len(rows), HEADS, 1, D)
        k, v = torch.randn(2, len(rows), KV_HEADS, 1, D)
        out = cache.attend(0, q, k, v, SCALE, window)
        for i, row in enumerate(rows):
            row[:] = (
                torch.cat([x, new[i, :, 0][None]]) for x, new in zip(row, (k, v), strict=True)
            )
            keys, values = (x[-window:] for x in row)
            expected = attention(q[i].transpose(0, 1), keys, values, None)
            torch.testing.assert_close(out[i], expected, atol=2e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def gemma():
    config = AutoConfig.for_model("gemma3", **RELEASED["gemma3"])
    return member_of(family_at(config), config, ".")


def engine_of(member):
    return TorchEngine(
        member.policy().model,
        member.family,
        banned=member.banned,
        pixels=lambda image: pixels_of(member, image),
        image_tokens=member.image_tokens,
        max_running=64,
    )


def next_turn(member, request, sample, rng, name):
    """The conversation so far, an image, text."""
    added = random_request(member, rng, SIZES[:1])
    return replace(
        request,
        ids=np.concatenate([request.ids, sample.ids, added.ids]),
        images=(*request.images, *added.images),
        image_grids=np.concatenate([request.image_grids, added.image_grids]),
        seeds=request.seeds[:1],
        sessions=(name,),
    )


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_turns_behind_cached_ones_are_those_of_a_full_forward(gemma, recomputes, monkeypatch):
    """Also where keys and values are computed anew amid the samples, as after an update of the weights."""
    rng = np.random.default_rng(2)
    sampling = SamplingParams(max_new_tokens=9)
    requests = [
        random_request(gemma, rng, sizes, sampling, (1, 2)) for sizes in (SIZES[:2], (), SIZES[2:3])
    ]
    requests = [replace(r, sessions=(f"{i}/0", f"{i}/1")) for i, r in enumerate(requests)]
    model, engine = gemma.model(), engine_of(gemma)
    decode, steps = engine.batch.decode, []

    def decode_and_recompute(version):
        decode(version)
        steps.append(version)
        if recomputes and len(steps) % 3 == 0:
            engine.batch.recompute(engine.pixels)

    monkeypatch.setattr(engine.batch, "decode", decode_and_recompute)
    try:
        prompt_tokens = 0
        for _ in range(3):
            completions = engine.generate(requests)
            following = []
            for request, completion in zip(requests, completions, strict=True):
                group = answered(request, completion.samples, "sampled")
                for i, trajectory in enumerate(group.trajectories):
                    (sequence,) = trajectory.sequences
                    with torch.no_grad():
                        expected = logprobs_of(gemma, model, sequence).numpy()
                    measured = sequence.logprobs[sequence.loss_mask]
                    np.testing.assert_allclose(measured, expected, atol=1e-5)
                    sample, name = completion.samples[i], request.sessions[i]
                    following.append(next_turn(gemma, request, sample, rng, name))
            prompt_tokens += sum(len(request.ids) for request in requests)
            requests = following
        assert recomputes or engine.prefilled_tokens < 0.7 * prompt_tokens
    finally:
        engine.close()
