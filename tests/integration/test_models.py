"""Every family against transformers, a tiny random member of unusual sizes each: a test computes a cell of docs/models.md.

`RLINF_VL_FIGURES=docs/models.json python -m pytest tests/integration/test_models.py` measures the figures anew, and
`python docs/generate_models_page.py` writes the page.
"""

from dataclasses import replace
from functools import cache

import figures
import numpy as np
import pytest
import torch
from adapters import adapted, peft_model, with_values
from plain_step import LR, Layout, groups_of, plain_reference
from tiny import (
    IMAGE_TOKENS,
    MEMBERS,
    PAD,
    TEXT,
    VISION,
    answered,
    banned,
    group,
    pixels,
    tiny_config,
    tiny_model,
    tiny_policy,
    transformers_logprobs,
)
from tiny import request as tiny_request
from trained_step import trained_step

from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.saving import save_model
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import SamplingParams

LORA = LoraConfig(rank=3, alpha=6.0, target_modules=["all-linear"])
WITH_TOWER = [name for name, family in FAMILIES.items() if family.vision_tower]
TEXT_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 20,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 28,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 20,
}
VISION_SIZES = {
    "depth": 3,
    "hidden_size": 36,
    "num_heads": 3,
    "intermediate_size": 44,
    "deepstack_visual_indexes": [0, 2],
    "fullatt_block_indexes": [0],
}


def sizes_of(name: str) -> dict[str, dict]:
    """Those that a member of the family has."""
    text, vision = MEMBERS[name]
    return {
        "text": {key: TEXT_SIZES[key] for key in TEXT_SIZES.keys() & (TEXT | text)},
        "vision": {
            key: VISION_SIZES[key] for key in VISION_SIZES.keys() & (VISION | (vision or {}))
        },
    }


def keep(name: str, column: str, *measured: float, limit: float = 1e-5) -> None:
    """transformers' own rule for gated delta nets is further than its other layers from a float64 run of it."""
    recurrent = FAMILIES[name].decode_state(tiny_config(name)).row_shapes
    figures.keep(name, column, *measured, limit=10 * limit if recurrent else limit)


def member(name: str, seed: int = 0):
    return tiny_model(seed, family=name, **sizes_of(name))


def kind_of(name: str) -> str:
    return "mixed" if FAMILIES[name].vision_tower else "text"


# --- packed rows ------------------------------------------------------------------------------------------------------


@cache
def one_at_a_time(name: str, tree: bool, adapters: bool):
    """Trajectories, their logprobs and the gradients of a sum of them, by transformers' own forward of each sequence."""
    if tree:  # every turn is a sequence of its own, and shares a part of those before it
        groups = groups_of(f"{kind_of(name)} turns sequences")[1:3]
    else:  # images of one window and of several, several in one prompt, and none
        rng, images = np.random.default_rng(0), bool(FAMILIES[name].vision_tower)
        shapes = {
            "a": ([(2, 3)], [5, 1, 9]),
            "b": ([], [4, 6]),
            "c": ([(1, 1), (5, 3), (3, 4)], [7, 3]),
        }
        groups = [
            group(rng, shown if images else [], lengths, g)
            for g, (shown, lengths) in shapes.items()
        ]
    members = [
        Member(g, i, [0.0] * len(t.turns)) for g in groups for i, t in enumerate(g.trajectories)
    ]
    model = with_values(peft_model(name, LORA, **sizes_of(name))) if adapters else member(name)
    logprobs = torch.cat([transformers_logprobs(model.train(), m.group, m.index) for m in members])
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return members, logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}


def differences(
    name: str, *, tree: bool = False, share: bool = True, adapters: bool = False
) -> tuple[float, float]:
    """Of one packed row, in logprobs and in gradients."""
    members, expected, gradients = one_at_a_time(name, tree, adapters)
    policy = (
        adapted(name, LORA, **sizes_of(name))
        if adapters
        else tiny_policy(model_type=name, **sizes_of(name))
    )
    collator = Collator(policy.family, IMAGE_TOKENS, pixels, PAD, None, share)
    logprobs, _ = policy.train()(collator(members, run_vision=True))
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    worst = 0.0
    for parameter, p in policy.model.named_parameters():
        grad = gradients[parameter]
        assert (p.grad is None) == (grad is None), parameter
        if grad is not None:
            # Where one is NaN, np.maximum is NaN, and max is not.
            worst = float(np.maximum(worst, relative(p.grad, grad, float(grad.abs().max()))))
    return relative(logprobs.detach(), expected, 1.0), worst


def relative(value, expected, scale: float) -> float:
    return float(abs(value - expected).max()) / max(1.0, scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed(name):
    keep(name, "packed", *differences(name, share=False))


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_shared(name):
    keep(name, "shared", *differences(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_tree(name):
    keep(name, "tree", *differences(name, tree=True))


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_lora(name):
    # The adapters of this test are large.
    keep(name, "lora", *differences(name, adapters=True), limit=3e-5)


# --- a training step --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step(processes):
    """(family, ranks, whether the tower is trained) → (loss, gradient norm, new weights) of a step."""

    @cache
    def go(name: str, ranks: int, tower: bool):
        metrics, weights, _ = trained_step(processes, layout(name, ranks, tower), kind_of(name))
        return metrics["actor/loss"], metrics["actor/grad_norm"], weights

    return go


def layout(name: str, ranks: int, tower: bool) -> Layout:
    return Layout(
        family=name,
        sizes=sizes_of(name),
        ranks=ranks,
        train_tower=tower,
        budget=90,
        checkpointing=True,
    )


def step_difference(one, other) -> float:
    """The largest in loss, gradient norm and weights' changes, relative to the norm."""
    loss, norm, weights = other
    assert one[2].keys() == weights.keys()
    changes = [relative(one[2][n], weights[n], norm) / LR for n in weights]
    return float(np.max([*changes, abs(one[1] - norm) / norm, abs(one[0] - loss)]))


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks(name, step):
    keep(name, "ranks", step_difference(step(name, 2, True), step(name, 1, True)))


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_all_trained(name, step):
    keep(
        name,
        "trained",
        step_difference(step(name, 2, True), plain_reference(layout(name, 2, True), kind_of(name))),
    )


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe")
@pytest.mark.parametrize("name", WITH_TOWER)
def test_frozen(name, step):
    keep(
        name,
        "frozen",
        step_difference(
            step(name, 2, False), plain_reference(layout(name, 2, False), kind_of(name))
        ),
    )


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_two_optimizer_steps(name, processes):
    """The second gradient is taken where the first step led. Of delta nets, transformers' own moves by 1e-4 when the weights
    that it starts from are off by their last bit: there no more than some times that can be asked."""
    two = replace(layout(name, 1, tower=False), minibatches=2)

    def ours(ranks: int):
        metrics, weights, _ = trained_step(processes, replace(two, ranks=ranks), kind_of(name))
        return metrics["actor/loss"], metrics["actor/grad_norm"], weights

    one, plain = ours(1), plain_reference(two, kind_of(name))
    moved = 0.0
    if FAMILIES[name].decode_state(tiny_config(name)).row_shapes:
        moved = max(
            step_difference(plain_reference(two, kind_of(name), nudge), plain) for nudge in range(3)
        )
    assert step_difference(ours(2), one) <= 1e-5
    assert step_difference(one, plain) <= max(1e-5, 4 * moved)


# --- engines and exports ----------------------------------------------------------------------------------------------


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe", "qwen3")
@pytest.mark.parametrize("name", FAMILIES)
def test_torch_engine(name):
    rng, policy = np.random.default_rng(1), tiny_policy(model_type=name, **sizes_of(name))
    shapes = [[(2, 3)], [], [(4, 3), (1, 2)]] if policy.family.vision_tower else [[], [], []]
    requests = [
        tiny_request(rng, shown, SamplingParams(max_new_tokens=12), (1, 2, 3)) for shown in shapes
    ]
    engine = TorchEngine(
        policy.model, policy.family, banned=banned(), pixels=pixels, image_tokens=IMAGE_TOKENS,
        max_running=64,
    )  # fmt: skip
    try:
        completions = engine.generate(requests)
    finally:
        engine.close()
    model, worst = member(name), 0.0
    for request, completion in zip(requests, completions, strict=True):
        g = answered(request, completion.samples)
        for i, sample in enumerate(completion.samples):
            expected = transformers_logprobs(model, g, i).detach().numpy()
            worst = float(np.maximum(worst, np.abs(sample.logprobs - expected).max()))
    keep(name, "torch", worst)


@pytest.mark.sample("qwen3_vl", "qwen3_5_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_export(name, tmp_path):
    members, expected, _ = one_at_a_time(name, False, False)
    save_model(member(name), FAMILIES[name], tmp_path)
    model, info = FAMILIES[name].model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    logprobs = torch.cat([transformers_logprobs(model, m.group, m.index) for m in members])
    keep(name, "export", float((logprobs - expected).detach().abs().max()))
