"""What needs a GPU: attention and delta-net kernels, whole models of every family, an update, its waits, the engine.

`python -m pytest tests/gpu` on a machine that has one; skipped elsewhere. References are computed in float64 or float32 by
another implementation: an explicit mask, a loop over tokens, transformers' own forward.
"""

from dataclasses import replace

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
    group,
    pixels,
    request,
    tiny_collator,
    tiny_model,
    tiny_policy,
    tiny_trainer,
    transformers_inputs,
    transformers_logprobs,
)
from torch.nn.functional import scaled_dot_product_attention
from unit.models.test_attention import ROWS, mask_of
from unit.models.test_delta import ROWS as DELTA_ROWS
from unit.models.test_delta import by_path
from unit.models.test_delta import inputs as delta_inputs

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.config.schema import ActorConfig
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.engines.torch.sampling import Sampler, uniforms
from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.families import family_of
from rlinf_vl.models.kernels import delta
from rlinf_vl.models.kernels.delta import Mixer, delta_rule
from rlinf_vl.models.kernels.delta_layout import DeltaLayout
from rlinf_vl.models.loading import freeze, use_packed_attention
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.packing.planner import Item
from rlinf_vl.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CUDA = "cuda"
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe", "qwen3"]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the Frobenius norm; inf where ours is not finite."""
    ours, exact = ours.detach().double().cpu(), exact.detach().double().cpu()
    return (
        float((ours - exact).norm() / exact.norm().clamp_min(1e-30))
        if ours.isfinite().all()
        else float("inf")
    )


@pytest.fixture
def mesh():
    join_ranks(CUDA)
    yield Mesh.make(CUDA)
    dist.destroy_process_group()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_and_its_gradients(row, kv_heads, dim, dtype):
    """FlashAttention in half precision, matrix products in float32, against a softmax under an explicit mask in float64."""
    lengths, prefix = ROWS[row]
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, sum(lengths), dim).to(dtype) for h in (4, kv_heads, kv_heads)]
    ours, exact = (
        [x.to(*to).requires_grad_() for x in inputs] for to in ((CUDA,), (torch.float64,))
    )
    plan = SegmentAttention(np.cumsum([0, *lengths]), np.array(prefix), device=CUDA, dtype=dtype)
    out = plan.attend(0, *ours, 0.3).transpose(1, 2)
    expected = scaled_dot_product_attention(
        *exact, attn_mask=mask_of(lengths, prefix), scale=0.3, enable_gqa=True
    )
    grad = torch.randn_like(expected).to(dtype)
    bound = 2e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5
    assert error(out, expected) < bound
    made = (
        torch.autograd.grad(out, ours, grad.to(CUDA)),
        torch.autograd.grad(expected, exact, grad.double()),
    )
    for name, a, b in zip("qkv", *made, strict=True):
        if b.norm() > 1e-6 * grad.double().norm():  # rows of one token have no gradient in q and k
            assert error(a, b) < bound, name


@pytest.mark.parametrize("row", [row for row in DELTA_ROWS if not row.startswith("empty")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_delta_nets_and_their_gradients(row, dtype):
    """flash-linear-attention's kernel where it is installed and the dtype is its own, else chunks in PyTorch's operations."""
    (lengths, prefix), sizes = DELTA_ROWS[row], (2, 4, 64, 64, 4)
    exact = delta_inputs(sum(lengths), sizes)
    ours = [x.detach().to(CUDA, dtype).requires_grad_() for x in exact]
    # Log decays are float32 in a model, too.
    ours[1] = exact[1].detach().float().to(CUDA).requires_grad_()
    layout = DeltaLayout(np.cumsum([0, *lengths]), np.array(prefix), CUDA)
    out, _, states = delta_rule(*ours[:3], Mixer(ours[3], *sizes[:4]), layout, None)
    expected, _, expected_states = by_path(lengths, prefix, *exact, sizes)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-4
    assert error(out, expected) < bound and error(states, expected_states) < bound
    grad = torch.randn_like(expected).to(dtype)
    made = (
        torch.autograd.grad(out, ours, grad.to(CUDA)),
        torch.autograd.grad(expected, exact, grad.double()),
    )
    for name, a, b in zip(("qkv", "g", "beta", "weight"), *made, strict=True):
        assert error(a, b) < 2 * bound, name


def test_which_kernel_a_delta_net_has_is_seen():
    pytest.importorskip(
        "fla.ops.gated_delta_rule", reason="flash-linear-attention is not installed (fla-core)"
    )
    assert delta._rule_for(CUDA, torch.bfloat16) is not None


def some_groups(family: str):
    rng, text = np.random.default_rng(0), family == "qwen3"
    shapes = [[], [], []] if text else [[(2, 3)], [], [(1, 1), (3, 2), (2, 2)]]
    return [
        group(rng, s, r, str(i))
        for i, (s, r) in enumerate(zip(shapes, ([5, 1, 9], [4, 6], [7, 3]), strict=True))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_float32_equals_transformers(family):
    groups = some_groups(family)
    members = [Member(g, i, [0.0]) for g in groups for i in range(len(g.trajectories))]
    expected = torch.cat(
        [transformers_logprobs(tiny_model(family=family), m.group, m.index) for m in members]
    )
    batch = replace(tiny_collator(), family=family_of(family))(
        members, run_vision=family != "qwen3"
    )
    ours = tiny_policy(model_type=family).to(CUDA)(batch)[0]
    torch.testing.assert_close(ours.cpu(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_bfloat16_is_as_near_to_float32_as_transformers(family):
    """Logprobs and the gradient of their sum, each within twice transformers' own error in bfloat16 on this GPU."""
    groups = some_groups(family)
    members = [Member(g, i, [0.0]) for g in groups for i in range(len(g.trajectories))]
    batch = replace(tiny_collator(), family=family_of(family))(
        members, run_vision=family != "qwen3"
    )

    def theirs(model):
        found = []
        for m in members:
            (sequence,) = m.group.trajectories[m.index].sequences
            ids, images = transformers_inputs(sequence)
            device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
            images = {
                k: v.to(device, dtype) if k == "pixel_values" else v.to(device)
                for k, v in images.items()
            }
            ids = ids.to(device)
            if hasattr(model.model, "rope_deltas"):
                model.model.rope_deltas = None
            logits = (
                model(input_ids=ids, attention_mask=torch.ones_like(ids), **images)
                .logits[0]
                .float()
            )
            logits[:, torch.from_numpy(banned()).to(device)] = -torch.inf
            where = torch.from_numpy(np.flatnonzero(sequence.loss_mask)).to(device)
            found.append(logits.log_softmax(-1)[where - 1, ids[0, where]])
        return torch.cat(found)

    def with_gradient(model, logprobs):
        total = logprobs.sum()
        params = {
            n: p for n, p in model.named_parameters() if "language_model" in n or family == "qwen3"
        }
        made = torch.autograd.grad(total, list(params.values()), allow_unused=True)
        return logprobs.detach(), torch.cat(
            [g.float().flatten().cpu() for g in made if g is not None]
        )

    exact_model = tiny_model(family=family)
    exact = with_gradient(exact_model, theirs(exact_model))
    half = tiny_model(family=family)
    for p in half.parameters():
        p.data = p.data.bfloat16()
    half = half.to(CUDA)
    reference = with_gradient(half, theirs(half))
    policy = tiny_policy(torch.bfloat16, model_type=family).to(CUDA)
    ours = with_gradient(policy.model, policy(batch)[0])
    for name, a, b, target in zip(("logprobs", "gradient"), ours, reference, exact, strict=True):
        print(f"{family} {name}: ours {error(a, target):.4f}, transformers {error(b, target):.4f}")
        assert error(a, target) < max(2 * error(b, target), 5e-3), name


def bfloat16() -> ActorConfig:
    actor = ActorConfig()
    actor.fsdp_config.mixed_precision.param_dtype = "bf16"
    actor.model.freeze_vision_tower = True
    return actor


def minibatch(groups):
    items = tuple(Item(g, i, 1, 1) for g in groups for i in range(len(groups[g].trajectories)))
    return RankMiniBatch(
        (items,), (True,), sum(t.n_response_tokens for g in groups.values() for t in g.trajectories)
    )


def test_an_update_equals_that_of_a_cpu(mesh):
    """float32, one rank, NCCL: loss, gradient norm and the weights after a step."""
    groups = dict(enumerate(some_groups("qwen3_vl")))
    advantages = [
        tuple((float(i - 1),) for i in range(len(g.trajectories))) for g in groups.values()
    ]
    found = []
    for device in (CUDA, "cpu"):
        trainer = tiny_trainer(Mesh.make(device))
        metrics = trainer.update(groups, [minibatch(groups)], advantages)[0].compute()
        weights = torch.cat([
            p.full_tensor().detach().cpu().flatten() if hasattr(p, "full_tensor") else p.detach().cpu().flatten()
            for p in trainer.policy.parameters()
        ])  # fmt: skip
        found.append((metrics, weights))
    (ours, weights), (exact, exact_weights) = found
    assert ours["actor/loss"] == pytest.approx(exact["actor/loss"], abs=1e-5)
    assert ours["actor/grad_norm"] == pytest.approx(exact["actor/grad_norm"], rel=1e-4)
    torch.testing.assert_close(weights, exact_weights, atol=5e-6, rtol=1e-5)


def test_a_micro_batch_does_not_wait_for_the_gpu():
    """PyTorch's own check of synchronizing calls, in forward and backward of a frozen tower's model in bfloat16."""
    policy = tiny_policy(torch.bfloat16, temperature=0.7, chunk=6)
    freeze(policy.model, policy.family)
    policy = policy.to(CUDA)
    groups = some_groups("qwen3_vl")
    members = [Member(g, i, [0.0]) for g in groups for i in range(len(g.trajectories))]
    batch = tiny_collator()(members, run_vision=True)
    features = policy.encode(batch.pixel_values, batch.grids)
    batch = replace(tiny_collator(), pixels=None)(members, run_vision=False)
    policy(batch, features)[0].sum().backward()  # first calls set things up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs, entropy = policy(batch, features)
        (logprobs.sum() + entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engine_samples_with_the_trainers_logprobs(family, dtype):
    model = use_packed_attention(tiny_model(family=family), family_of(family))
    for p in model.parameters():
        p.data = p.data.to(dtype)
    engine = TorchEngine(
        model, family_of(family), banned=banned(), pixels=pixels, image_tokens=IMAGE_TOKENS,
        max_running=64, device=CUDA,
    )  # fmt: skip
    rng, sampling = np.random.default_rng(1), SamplingParams(stop_ids=(EOS,), max_new_tokens=12)
    asked = [request(rng, s, sampling, range(8)) for s in ([(2, 3)], [], [(1, 1), (3, 2), (2, 2)])]
    policy = tiny_policy(dtype, model_type=family).to(CUDA)
    collate = Collator(family_of(family), IMAGE_TOKENS, pixels, PAD)
    for r, completion in zip(asked, engine.generate(asked), strict=True):
        g = answered(r, completion.samples)
        batch = collate([Member(g, i, [0.0]) for i in range(8)], run_vision=bool(g.images))
        ours, sampled = policy(batch)[0].detach().cpu(), torch.as_tensor(batch.rollout_logprobs)
        difference = (ours - sampled).abs()
        print(f"{family} {dtype}: mean {difference.mean():.2e}, max {difference.max():.2e}")
        assert difference.max() < (1e-4 if dtype == torch.float32 else 0.2)
        assert difference.mean() < (1e-5 if dtype == torch.float32 else 0.03)
    engine.close()


def test_no_draw_over_a_large_vocabulary_gives_a_banned_id():
    """A cumulative sum on a GPU is neither monotone nor constant where nothing is added."""
    torch.manual_seed(0)
    vocab, rows = 151_936, 64
    forbidden = torch.rand(vocab) < 0.5
    logits = torch.randn(rows, vocab, device=CUDA) * 3
    sampler = Sampler([SamplingParams()] * rows, forbidden.to(CUDA))
    exact = logits.double().masked_fill(forbidden.to(CUDA), -torch.inf).log_softmax(-1)
    for seed in range(50):
        ids, logprobs = sampler(logits, torch.from_numpy(uniforms(seed, rows)).to(CUDA))
        assert not forbidden[ids.cpu()].any()
        torch.testing.assert_close(
            logprobs.double(), exact.gather(1, ids[:, None])[:, 0], atol=1e-4, rtol=1e-5
        )
