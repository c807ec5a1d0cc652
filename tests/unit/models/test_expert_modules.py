"""Mixtures of experts are known by their structure, whatever transformers calls their parts."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.models.expert_modules import active_numel, expert_weights, mixture_of, routers
from rlinf_vl.models.families import family_at
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.lora import add_adapters, train_parts
from rlinf_vl.tools.memory.model import Weights
from rlinf_vl.tools.verify.prove.member import member_of
from rlinf_vl.tools.verify.prove.proofs import Proofs

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
#: By type of a text model: settings of a mixture of 6 experts, and the path of a router.
TEXTS = {
    "qwen3_moe": ({"num_experts": 6}, "mlp.gate"),
    "mixtral": ({"num_local_experts": 6}, "mlp.gate"),
    "gpt_oss": ({"num_local_experts": 6}, "mlp.router"),
    "granitemoe": ({"num_local_experts": 6}, "block_sparse_moe.router"),
    "aria_text": ({"moe_num_experts": 6}, "mlp.router"),
    "gemma4_text": ({"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}, "router"),
    "qwen3": ({}, None),
}
ALL_LINEAR = LoraConfig(rank=1, alpha=6.0, target_modules=["all-linear"])


def internvl():
    """Make an InternVL on the general path, whose text model is a mixture of 6 experts."""
    text = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
    return AutoConfig.for_model("internvl", text_config=SIZES | text)


def on_meta(config):
    family = family_at(config)
    with torch.device("meta"):
        model = family.model_class.from_config(config, attn_implementation="sdpa")
    return use_packed_attention(model, family), family


@pytest.mark.parametrize("model_type", TEXTS)
def test_routers_and_experts_are_found_by_structure(model_type):
    settings, router = TEXTS[model_type]
    config = AutoConfig.for_model(model_type, **SIZES | settings)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    if router is None:
        assert not routers(model) and not expert_weights(model) and mixture_of(model) is None
        return
    assert list(routers(model)) == [f"layers.{i}.{router}" for i in range(2)]
    experts = {name for name, p in model.named_parameters() if ".experts." in name}
    assert set(expert_weights(model)) == experts
    mixture = mixture_of(model)
    assert mixture is not None and (mixture.layers, mixture.experts) == ((0, 1), 6)
    assert mixture.top_k == getattr(config, "num_experts_per_tok", 2)


@pytest.mark.slow
def test_routers_of_the_general_path_are_frozen_and_experts_counted():
    model, family = on_meta(internvl())
    train_parts(model, family, (), None, router=False)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [f"model.language_model.layers.{i}.mlp.gate.weight" for i in range(2)]
    experts = sum(p.numel() for p in expert_weights(model).values())
    assert experts == 2 * 6 * 3 * 24 * 32
    assert Weights(model, family).experts == experts
    # Of 6 experts a token uses 2: they count so in the prices of its layers.
    blocks = model.get_submodule(family.text_blocks)
    numel = sum(p.numel() for p in blocks.parameters())
    assert active_numel(model, family.text_blocks) == numel - experts * 2 // 3
    add_adapters(model, family, ALL_LINEAR)
    assert Weights(model, family).experts == experts, "adapters of rank 1 are no routers"


@pytest.mark.slow
def test_adapters_of_a_mixture_on_the_general_path_are_proven(tmp_path):
    config = internvl()
    proofs = Proofs(member_of(family_at(config), config, tmp_path))
    assert max(proofs.lora()) <= proofs.limit
