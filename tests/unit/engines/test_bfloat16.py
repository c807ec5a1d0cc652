"""Trainer and torch engine compute the same in bfloat16: what is float32 on purpose in one is not rounded in the other."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import (
    EOS,
    IMAGE_TOKENS,
    PAD,
    answered,
    banned,
    pixels,
    request,
    tiny_model,
    tiny_policy,
)

from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.config.schema import FsdpConfig
from rlinf_vl.engines.torch.decode import DecodeCache
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.kernels.delta import Mixer, delta_rule, delta_step
from rlinf_vl.models.kernels.delta_layout import DeltaLayout
from rlinf_vl.models.loading import load_model
from rlinf_vl.models.policy import encode_images
from rlinf_vl.models.shapes import DecodeState
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import Request, SamplingParams

FAMILY = family_of("qwen3_vl")


@pytest.fixture
def trainer():
    """float32 master weights that compute in bfloat16."""
    join_ranks("cpu")
    yield Mesh.make("cpu").shard(tiny_policy(), FsdpConfig())
    dist.destroy_process_group()


@pytest.fixture
def engine(tmp_path):
    """The same weights, read in bfloat16 as a rollout worker reads them."""
    tiny_model().save_pretrained(tmp_path)
    model = load_model(tmp_path, FAMILY, torch.bfloat16)
    engine = TorchEngine(
        model,
        FAMILY,
        banned=banned(),
        pixels=pixels,
        image_tokens=IMAGE_TOKENS,
        max_running=64,
    )
    yield engine
    engine.close()


def some_requests() -> list[Request]:
    rng, sampling = np.random.default_rng(1), SamplingParams(stop_ids=(EOS,), max_new_tokens=6)
    return [
        request(rng, s, sampling, range(8))
        for s in ([(2, 3)], [], [(1, 1), (3, 2), (2, 2)], [(4, 3)])
    ]


@torch.no_grad()
def test_the_trainers_features_are_the_engines_bit_for_bit(trainer, engine):
    requests = [r for r in some_requests() if r.images]
    patches = np.concatenate([pixels(i) for r in requests for i in r.images])
    grids = np.concatenate([r.image_grids for r in requests]).astype(np.int64)
    ours, theirs = (
        trainer.encode(patches, grids),
        encode_images(engine.model, FAMILY, patches, grids, "cpu"),
    )
    for a, b in zip(
        [ours.tokens, *ours.deepstack], [theirs.tokens, *theirs.deepstack], strict=True
    ):
        assert a.dtype == b.dtype == torch.bfloat16
        assert torch.equal(a, b), f"{(a != b).float().mean():.0%} of the features differ"


@torch.no_grad()
def test_the_trainer_gives_a_first_token_the_logprob_it_was_sampled_with(trainer, engine):
    collate = Collator(FAMILY, IMAGE_TOKENS, pixels, PAD)
    for asked in some_requests():
        (completion,) = engine.generate([asked])
        g = answered(asked, completion.samples)
        batch = collate([Member(g, i, [0.0]) for i in range(8)], run_vision=bool(g.images))
        logprobs = trainer(batch)[0].numpy()
        first = np.flatnonzero(np.diff(batch.trajectories, prepend=-1))
        # 1e-6: the head's float32 sums, taken over another number of rows at once
        np.testing.assert_allclose(
            logprobs[first], batch.rollout_logprobs[first], atol=1e-6, rtol=0
        )


def test_a_decoding_step_does_not_round_its_scores():
    """Scores of about 30 are rounded by 0.06 in bfloat16, which moves a weight by 6 %."""
    torch.manual_seed(0)
    heads, length, dim, scaling = 4, 40, 16, 1 / 3
    prompt_k, prompt_v = (torch.randn(length, heads, dim).mul(3).bfloat16() for _ in range(2))
    cache = DecodeCache(DecodeState((0,), heads, dim), torch.bfloat16, torch.device("cpu"))
    cache.append(torch.stack([prompt_k, prompt_v])[None], [torch.arange(length)], [length], [2], {})
    ks, vs, out = [], [], torch.empty(0)
    for _ in range(5):
        q, k, v = (torch.randn(2, heads, 1, dim).mul(3).bfloat16() for _ in range(3))
        ks.append(k), vs.append(v)
        cache.begin_step()
        out = cache.attend(0, q, k, v, scaling)
    keys, values = (
        torch.cat([shared.transpose(0, 1).expand(2, -1, -1, -1), *own], dim=2).float()
        for shared, own in ((prompt_k, ks), (prompt_v, vs))
    )
    exact = torch.softmax(q.float() @ keys.transpose(-1, -2) * scaling, -1) @ values  # [2, H, 1, D]
    assert out.dtype == torch.bfloat16
    error = (out.float().transpose(1, 2) - exact).norm() / exact.norm()
    assert error < 4e-3, f"{error:.1e} of the output"


def test_a_decoding_step_of_a_delta_net_rounds_what_the_packed_row_rounds():
    """Products of its convolution in bfloat16 would move half of the outputs."""
    torch.manual_seed(0)
    mixer = Mixer(torch.randn(2 * 8 + 4 * 8, 4).bfloat16(), 1, 4, 8, 8)
    qkv, g, beta = torch.randn(24, 48).bfloat16(), -torch.rand(24, 4), torch.rand(24, 4)
    whole, tails, states = delta_rule(qkv, g, beta, mixer, DeltaLayout(np.array([0, 24])))
    _, tail, state = delta_rule(qkv[:9], g[:9], beta[:9], mixer, DeltaLayout(np.array([0, 9])))
    steps = [
        delta_step(qkv[t, None], g[t, None], beta[t, None], mixer, tail, state)
        for t in range(9, 24)
    ]
    assert (torch.cat(steps) == whole[9:]).float().mean() > 0.98
    assert torch.equal(tail, tails)
    torch.testing.assert_close(state, states, atol=1e-5, rtol=1e-5)
