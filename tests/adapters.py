"""Tiny members with adapters, made by us and by peft alone; and how far their logprobs are apart."""

import tempfile
from collections.abc import Iterable

import numpy as np
import torch
from tiny import MEMBERS, group, tiny_collator, tiny_model, tiny_policy, transformers_logprobs

from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.models.lora import is_adapter, train_parts
from rlinf_vl.packing.collator import Member


def peft_model(family: str, settings: LoraConfig, **sizes):
    """transformers' model with adapters as peft puts them: on every linear module by peft's own name for them, or in the text model
    by a pattern; on experts by the names of their parameters."""
    # Seconds, which not every process that imports this has to spend.
    from peft import (
        LoraConfig as PeftConfig,
    )
    from peft import inject_adapter_in_model

    sees = MEMBERS[family][1] is not None
    wanted = "all-linear"
    if settings.target_modules == ["language"] and sees:
        wanted = r"model\.language_model\..*(_proj|proj_[a-z]+|shared_expert_gate)"
    config = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.dropout,
        target_modules=wanted,
        target_parameters=["gate_up_proj", "down_proj"]
        if "num_experts" in MEMBERS[family][0]
        else None,
    )
    model = tiny_model(family=family, **sizes)
    if settings.quantization == "nf4":
        model = in_4_bits(
            model, ["lm_head", *["model.visual"] * (settings.target_modules == ["language"])]
        )
    return inject_adapter_in_model(config, model)


def in_4_bits(model, skipped: list[str]):
    """The model as transformers itself quantizes a checkpoint of it."""
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=skipped,
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        kind = type(model)
        quantized = kind.from_pretrained(
            folder, dtype=torch.float32, quantization_config=settings, device_map="cpu"
        )
    for module in quantized.modules():
        # Whose scales it otherwise rounds to bfloat16 when it first evaluates.
        if hasattr(module, "quant_state"):
            module.support_avx512bf16_for_cpu = False
    return quantized.eval()


def adapter_values(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Values that matter, for the adapters among these weights; the same for the same names and shapes."""
    torch.manual_seed(5)
    return {name: 0.2 * torch.randn(shape) for name, shape in shapes if is_adapter(name)}


def with_values(model):
    """The model with `adapter_values`."""
    weights = dict(model.named_parameters())
    for name, value in adapter_values((n, tuple(w.shape)) for n, w in weights.items()).items():
        weights[name].data = value
    return model


def adapted(family: str, settings: LoraConfig, **sizes):
    """Ours, with `adapter_values`."""
    policy = tiny_policy(model_type=family, **sizes)
    train_parts(policy.model, policy.family, (), settings)
    with_values(policy.model)
    return policy


def row_of(family: str):
    """Two groups of two (the first with an image, where the family sees), and their packed row."""
    rng = np.random.default_rng(0)
    shapes = [[(2, 3)], []] if MEMBERS[family][1] is not None else [[], []]
    groups = [group(rng, shape, [7, 4], name=str(i)) for i, shape in enumerate(shapes)]
    members = [Member(g, i, [0.0]) for g in groups for i in range(2)]
    return groups, tiny_collator()(members, run_vision=any(shapes))


def both_logprobs(family: str, settings: LoraConfig, **sizes):
    """((our policy, its logprobs on a packed row), (peft's model, its logprobs, one trajectory at a time))."""
    policy, model = (
        adapted(family, settings, **sizes),
        with_values(peft_model(family, settings, **sizes)),
    )
    groups, batch = row_of(family)
    theirs = torch.cat([transformers_logprobs(model, g, i) for g in groups for i in range(2)])
    return (policy, policy(batch)[0]), (model, theirs)
