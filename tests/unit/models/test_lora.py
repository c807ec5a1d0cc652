"""Adapters on packed rows against peft's own forward on transformers' model, one trajectory at a time."""

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from adapters import adapted, both_logprobs, peft_model, row_of, with_values
from tiny import MEMBERS, group, tiny_collator, tiny_model, tiny_policy, transformers_logprobs

from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.errors import ConfigError
from rlinf_vl.models import lora
from rlinf_vl.models.families import FAMILIES, family_of
from rlinf_vl.packing.collator import Member


@pytest.mark.parametrize("targets", ["all-linear", "language"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_pefts(family, targets):
    """Logprobs, and the gradient of every adapter; nothing else has one."""
    settings = LoraConfig(rank=4, alpha=6.0, target_modules=[targets])
    (policy, ours), (model, theirs) = both_logprobs(family, settings)
    others = dict(model.named_parameters())
    assert dict(policy.model.named_parameters()).keys() == others.keys()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours.mean().backward(), theirs.mean().backward()
    for name, weight in policy.model.named_parameters():
        assert weight.requires_grad == lora.is_adapter(name), name
        if weight.requires_grad:
            torch.testing.assert_close(
                weight.grad, others[name].grad, atol=2e-6, rtol=1e-3, msg=name
            )
    sees = MEMBERS[family][1] is not None
    moved = any(
        "visual" in n and w.grad.abs().max() > 0 for n, w in others.items() if lora.is_adapter(n)
    )
    assert moved == (targets == "all-linear" and sees)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_without_adapters_it_is_the_base(family):
    """Off for the reference, bit for bit; merged, what peft merges."""
    policy = adapted(family, LoraConfig(rank=3, alpha=6.0, target_modules=["all-linear"]))
    _, batch = row_of(family)
    base, _ = tiny_policy(model_type=family)(batch)
    with_adapters, _ = policy(batch)
    with lora.adapters_off(policy.model):
        assert torch.equal(policy(batch)[0], base)
    assert (policy(batch)[0] - base).abs().max() > 0.01

    plain = tiny_policy(model_type=family)
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    given = dict(plain.model.named_parameters())
    for name, weight, adapter in lora.engine_weights(policy.model, merged=True):
        if adapter is not None:
            given[name].copy_(lora.with_adapter(weight, adapter))
    now = dict(policy.model.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in before.items()), (
        "nothing changes in place"
    )
    torch.testing.assert_close(plain(batch)[0], with_adapters, atol=1e-5, rtol=0)
    by_peft = copy.deepcopy(policy.model)
    for layer in lora.adapters(by_peft).values():
        layer.merge()
    for name, weight, _ in lora.engine_weights(by_peft, merged=True):
        torch.testing.assert_close(given[name], weight, atol=1e-6, rtol=0, msg=name)
    lora.merge_adapters(policy.model)
    merged = dict(policy.model.named_parameters())
    assert merged.keys() == given.keys()
    for name, weight in merged.items():
        assert torch.equal(weight, given[name]), name


def names(family: str, targets: list[str], excluded: Sequence[str] = ()):
    return lora.adapted_names(
        tiny_model(family=family),
        family_of(family),
        LoraConfig(target_modules=targets, exclude_modules=list(excluded)),
    )


def test_names_and_patterns_say_where_adapters_go():
    vision, projector = names("qwen2_5_vl", ["vision"]), names("qwen2_5_vl", ["projector"])
    language, everything = names("qwen2_5_vl", ["language"]), names("qwen2_5_vl", ["all-linear"])
    assert sorted([*vision, *projector, *language]) == sorted(everything)
    assert all(name.startswith("model.visual.blocks.") for name in vision)
    assert projector == ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"]
    assert all(name.startswith("model.language_model.layers.") for name in language)
    assert "lm_head" not in everything
    gates = names("qwen2_5_vl", ["gate_proj"])
    assert any("visual" in name for name in gates) and any("language" in name for name in gates)
    assert names("qwen2_5_vl", ["gate_proj"], ["vision"]) == [
        name for name in gates if "language" in name
    ]
    assert names("qwen2_5_vl", [r".*layers\.1\..*[qk]_proj"]) == [
        f"model.language_model.layers.1.self_attn.{x}_proj" for x in "qk"
    ]
    assert names("qwen3_vl_moe", ["experts.down_proj"]) == [
        "model.language_model.layers.1.mlp.experts.down_proj"
    ]


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        (
            ["qproj"],
            [],
            [
                "lora.target_modules: 'qproj' matches no linear module",
                "layers.*.self_attn.q_proj",
                "merger",
            ],
        ),
        (["language"], ["kproj"], ["lora.exclude_modules: 'kproj' matches no linear module"]),
        (["q_proj"], ["language"], ["leave no module to adapt"]),
        (["lm_head"], [], ["'lm_head' matches no linear module"]),
    ],
)
def test_a_target_that_is_not_there_is_refused(targets, excluded, expected):
    with pytest.raises(ConfigError) as refused:
        names("qwen3_vl", targets, excluded)
    assert all(text in str(refused.value) for text in expected), refused.value


def test_experts_have_no_dropout():
    settings = LoraConfig(dropout=0.1, target_modules=["language"])
    policy = tiny_policy(model_type="qwen3_vl_moe")
    with pytest.raises(
        ConfigError, match=r"dropout: 0.1, but adapters of experts .*exclude_modules"
    ):
        lora.add_adapters(policy.model, policy.family, settings)
    settings.exclude_modules = [r".*\.experts\..*"]
    lora.add_adapters(policy.model, policy.family, settings)


def test_dropout_is_pefts():
    """The same seed drops the same where one trajectory is the whole row."""
    settings = LoraConfig(rank=4, target_modules=["language"], dropout=0.3)
    policy, model = (
        adapted("qwen3_vl", settings).train(),
        with_values(peft_model("qwen3_vl", settings)).train(),
    )
    g = group(np.random.default_rng(0), [], [9])
    batch = tiny_collator()([Member(g, 0, [0.0])], run_vision=False)
    torch.manual_seed(3)
    ours, _ = policy(batch)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, transformers_logprobs(model, g, 0), atol=1e-5, rtol=1e-5)
    assert (policy.eval()(batch)[0] - ours).abs().max() > 1e-3
