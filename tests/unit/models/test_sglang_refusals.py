"""Models that SGLang can't run are told from their config.json, by the reason; transformers' own defaults are not among them."""

import re

import pytest
from transformers import AutoConfig

from rlinf_vl.models.families import FAMILIES

KINDS = {"full": "full_attention", "linear": "linear_attention"}


@pytest.mark.parametrize("family", FAMILIES)
def test_default_members_run_on_a_gpu(family):
    config = AutoConfig.for_model(family).to_dict()
    assert not FAMILIES[family].sglang_refusals(config, on_cpu=False)
    assert not FAMILIES[family].sglang_refusals({"model_type": family}, on_cpu=False), (
        "and where config.json leaves everything out"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gated_delta_net_needs_a_gpu(family):
    for config in (AutoConfig.for_model(family).to_dict(), {"model_type": family}):
        found = FAMILIES[family].sglang_refusals(config, on_cpu=True)
        assert len(found) == family.startswith("qwen3_5"), found
        for reason in found:
            assert "need a GPU" in reason and reason.endswith("set rollout.rollout_backend=torch")


@pytest.mark.parametrize(
    ("family", "text", "vision", "reason"),
    [
        (
            "qwen2_5_vl",
            {},
            {"patch_size": 8},
            "patches of 1176 numbers .*, not of 384 .patch_size 8",
        ),
        ("qwen2_5_vl", {}, {"in_channels": 1}, "not of 392"),
        (
            "qwen3_vl_moe",
            {},
            {"deepstack_visual_indexes": [1, 2]},
            r"3 deepstack layers, .* is \[1, 2\]",
        ),
        (
            "qwen3_vl_moe",
            {"mlp_only_layers": [0]},
            {},
            r"every layer experts, .*mlp_only_layers is \[0\]",
        ),
        ("qwen3_vl_moe", {"decoder_sparse_step": 2}, {}, "decoder_sparse_step 2"),
        ("qwen3_5", {"layer_types": [KINDS["full"], KINDS["linear"]]}, {}, "every n-th layer"),
        ("qwen3_5_moe", {"layer_types": [KINDS["linear"]] * 2}, {}, "every n-th layer"),
    ],
)
def test_what_sglang_can_not_run(family, text, vision, reason):
    config = {"model_type": family, "text_config": text, "vision_config": vision}
    (found,) = FAMILIES[family].sglang_refusals(config, on_cpu=False)
    assert found.startswith(f"SGLang can't run this {family}: ") and found.endswith(
        "; set rollout.rollout_backend=torch"
    )
    assert re.search(reason, found), found


@pytest.mark.parametrize(
    "kinds", ["full", "linear full linear full linear", "full full", "linear linear full linear"]
)
def test_layers_that_alternate_evenly_run(kinds):
    config = {"text_config": {"layer_types": [KINDS[kind] for kind in kinds.split()]}}
    assert not FAMILIES["qwen3_5"].sglang_refusals(config, on_cpu=False)
