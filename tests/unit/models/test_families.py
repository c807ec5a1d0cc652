"""What each family says of its models: prices for the planner, modules that are sharded, what decoding stores.
That each computes what transformers computes is in tests/integration/test_models.py."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

from rlinf_vl.models.families import FAMILIES, family_of
from rlinf_vl.models.family import submodules
from rlinf_vl.models.known import model_config
from rlinf_vl.models.saving import save_model
from rlinf_vl.types import Prices

FAMILY = family_of("qwen3_vl")


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match="rollout.model.model_type: 'llava' is not a known family; known: qwen2_5_vl.*; auto takes others",
    ):
        family_of("llava")


def test_prices_are_ratios_of_multiply_adds():
    text = SimpleNamespace(
        hidden_size=4, num_hidden_layers=3, num_attention_heads=2, head_dim=5, num_key_value_heads=1,
        intermediate_size=7, vocab_size=11,
    )  # fmt: skip
    vision = SimpleNamespace(
        hidden_size=6,
        depth=2,
        intermediate_size=13,
        spatial_merge_size=2,
        out_hidden_size=4,
        deepstack_visual_indexes=[0],
    )
    config = SimpleNamespace(get_text_config=lambda: text, vision_config=vision)
    linear = 3 * (4 * 10 + 2 * 4 * 5 + 10 * 4 + 3 * 4 * 7)  # q, k and v, o, gated MLP
    prices = FAMILY.prices(config, True)
    assert prices.attention == pytest.approx(3 * (10 + 10) / linear)  # a pair: scores and values
    assert prices.head == pytest.approx(44 / linear)
    # A merger runs once for four patches.
    block, merger = (
        4 * 6 * 6 + 2 * 6 * 13,
        (24 * 24 + 24 * 4) / 4,
    )
    assert prices.patch == pytest.approx((2 * block + 2 * merger) / linear)
    assert FAMILY.prices(config, False).patch == pytest.approx(prices.patch / 3)


def test_the_default_prices_are_those_of_a_2b_model():
    config, _ = model_config("Qwen/Qwen3-VL-2B-Instruct")
    prices, default = FAMILY.prices(config, False), Prices()
    assert (prices.attention, prices.head, prices.patch) == pytest.approx(
        (default.attention, default.head, default.patch), rel=0.01
    )


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_units_are_the_blocks_and_the_rest_of_the_tower(family):
    """Each module once, those inside another before it: FSDP shards in that order."""
    model = tiny_model(family=family.model_type)
    names = {module: name for name, module in model.named_modules()}
    units = [names[module] for path in family.fsdp_units for module in submodules(model, path)]
    paths = [path for path in (family.vision_blocks, family.text_blocks) if path]
    blocks = [names[b] for path in paths for b in model.get_submodule(path).children()]
    towers = [family.vision_tower] if family.vision_tower else []
    assert sorted(units) == sorted([*blocks, *towers]) and len(blocks) == 2 * len(paths)
    assert all(
        not inner.startswith(f"{outer}.")
        for i, outer in enumerate(units)
        for inner in units[i + 1 :]
    )


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_layer_named_is_there(family):
    """A class that transformers renames would silently compute its own forward. (Of the MoE, layer 0 is dense.)"""
    assert set(family.layers()) <= {
        type(module).__name__ for module in tiny_model(family=family.model_type).modules()
    }


def test_decoding_stores_keys_and_values_of_every_layer():
    state = FAMILY.decode_state(tiny_model().config)
    assert state.kv_layers == (0, 1) and state.row_bytes() == 0
    # K and v, layers, heads, head size, bytes.
    assert state.token_bytes(torch.bfloat16) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_family_of_a_checkpoint_is_found(family, tmp_path):
    save_model(tiny_model(family=family.model_type), family, tmp_path)
    assert family_of("auto", tmp_path) is family
