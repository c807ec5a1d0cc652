"""Adapters on nf4 weights against peft on transformers' own 4-bit model, and against dense weights."""

import sys

import pytest
import torch
from adapters import adapted, both_logprobs, row_of
from tiny import tiny_model, tiny_policy

from rlinf_vl.config import load_config
from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.errors import ConfigError
from rlinf_vl.models import lora
from rlinf_vl.models.nf4 import dense, is_quantized, quantize, shape_of
from rlinf_vl.tools.check.inputs import packages_missing

pytest.importorskip("bitsandbytes")
NF4 = ["actor.model.is_lora=true", "actor.model.lora.quantization=nf4"]


def settings(*targets: str, **more) -> LoraConfig:
    return LoraConfig(
        rank=4, alpha=6.0, target_modules=list(targets) or ["language"], quantization="nf4", **more
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3"])
def test_logprobs_and_gradients_are_those_of_peft_on_transformers_4_bit_model(family):
    (policy, packed), (theirs, logprobs) = both_logprobs(family, settings())
    ours, others = dict(policy.model.named_parameters()), dict(theirs.named_parameters())
    assert {n for n, w in ours.items() if is_quantized(w)} == {
        n for n, w in others.items() if is_quantized(w)
    }
    for name, weight in ours.items():
        torch.testing.assert_close(dense(weight), dense(others[name]), atol=0, rtol=0, msg=name)
    torch.testing.assert_close(packed, logprobs, atol=1e-5, rtol=1e-5)
    packed.mean().backward(), logprobs.mean().backward()
    for name, weight in ours.items():
        assert weight.requires_grad == lora.is_adapter(name), name
        if weight.requires_grad:
            torch.testing.assert_close(
                weight.grad, others[name].grad, atol=1e-5, rtol=1e-3, msg=name
            )
            assert weight.grad.abs().max() > 0, name


@torch.no_grad()
@pytest.mark.parametrize("targets", ["language", "all-linear"])
def test_merged_weights_give_the_logprobs_of_the_adapted_model(targets):
    """Those that engines get, in a model that was never quantized; and those of an export."""
    policy, plain = adapted("qwen3_vl", settings(targets)), tiny_policy(model_type="qwen3_vl")
    _, batch = row_of("qwen3_vl")
    expected, before = policy.eval()(batch)[0], plain(batch)[0]
    given = dict(plain.model.named_parameters())
    for name, weight, adapter in lora.engine_weights(policy.model, merged=True):
        assert is_quantized(weight) == (adapter is not None), (
            "adapters are on all that is quantized, and on nothing else"
        )
        assert shape_of(weight) == given[name].shape
        if adapter is not None:
            given[name].copy_(lora.with_adapter(dense(weight), adapter))
    torch.testing.assert_close(plain(batch)[0], expected, atol=1e-5, rtol=0)
    assert (expected - before).abs().max() > 0.01
    with lora.adapters_off(policy.model):
        assert (policy(batch)[0] - before).abs().max() > 1e-3, "the reference is quantized, too"
    lora.merge_adapters(policy.model)
    merged = dict(policy.model.named_parameters())
    assert merged.keys() == given.keys()
    assert all(torch.equal(weight, given[name]) for name, weight in merged.items())
    assert any("visual" in n for n, w in merged.items() if not torch.equal(w, tiny_weight(n))) == (
        targets != "language"
    )


def tiny_weight(name: str, known: dict = {}) -> torch.Tensor:  # noqa: B006
    known = known or known.update(tiny_model(family="qwen3_vl").named_parameters()) or known
    return known[name]


def test_a_layer_is_near_its_dense_one_and_takes_half_a_byte_a_weight():
    linear = torch.nn.Linear(256, 128, dtype=torch.bfloat16)
    model = torch.nn.Sequential(linear)
    quantize(model, ["0"])
    weight = model[0].weight
    assert dense(weight).dtype == torch.bfloat16 and model[0].bias is linear.bias
    assert 0 < (dense(weight) - linear.weight).abs().max() < 0.17 * linear.weight.abs().max()
    assert weight.untyped_storage().nbytes() == linear.weight.numel() / 2
    assert (
        is_quantized(weight)
        and not is_quantized(linear.weight)
        and dense(linear.weight) is linear.weight
    )


def test_stacked_experts_are_refused_until_they_are_excluded():
    policy = tiny_policy(model_type="qwen3_vl_moe")
    with pytest.raises(
        ConfigError, match=r"quantization: nf4, but .*linear modules only.*exclude_modules"
    ):
        lora.add_adapters(policy.model, policy.family, settings())
    lora.add_adapters(policy.model, policy.family, settings(exclude_modules=[".*experts.*"]))
    names = [name for name, weight in policy.model.named_parameters() if is_quantized(weight)]
    assert names and all(".self_attn." in name or "mlp" in name for name in names)
    assert not any("experts" in name or name.endswith(".gate.weight") for name in names)


@pytest.mark.slow
def test_bitsandbytes_is_tried_before_the_run(monkeypatch, tmp_path):
    config = load_config("toy-grpo-cpu", NF4)
    assert list(packages_missing(config)) == []
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes/__init__.py").write_text("raise RuntimeError('no kernel image')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (said,) = packages_missing(config)
    assert (
        "quantization: nf4" in said
        and "fails on cpu" in said
        and "no kernel image" in said
        and "set none" in said
    )
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else object()
    )
    (said,) = packages_missing(config)
    assert f"not installed; {sys.executable} -m pip install 'rlinf_vl[qlora]'" in said
