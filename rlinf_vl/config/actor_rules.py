"""Rules for several keys of a config's `actor`; `rlinf_vl.config.validate` refuses configs that
break them."""

import re
from collections.abc import Iterator

from rlinf_vl.config.schema import Config


def actor_problems(config: Config) -> Iterator[str]:
    """Yield problems of what is trained, and of where weights are kept meanwhile."""
    actor, on_cpu = config.actor, config.cluster.device == "cpu"
    vlm = actor.model.vlm
    if (vlm.vision_encoder_attr is None) != (vlm.language_model_attr is None):
        yield (
            f"actor.model.vlm: vision_encoder_attr={vlm.vision_encoder_attr or 'null'} and "
            f"language_model_attr={vlm.language_model_attr or 'null'}; set both, or neither"
        )
    if actor.model.is_lora:
        yield from _lora(config)
    elif len(actor.model.frozen_parts) == 3:
        yield (
            "actor.model: freeze_vision_tower, freeze_projector and freeze_language_model leave "
            "nothing to train; set one of them false"
        )
    for key in ("freeze_router", "is_lora"):
        if actor.model.router_aux_loss_coef and getattr(actor.model, key):
            yield (
                f"actor.model.router_aux_loss_coef: {actor.model.router_aux_loss_coef:g} is a loss "
                f"for routers, which actor.model.{key} leaves as they are; set {key}=false, or the "
                "coefficient 0"
            )
    if (
        not actor.model.is_lora
        and actor.model.freeze_vision_tower
        and actor.optim.vision_tower_lr is not None
    ):
        yield (
            "actor.optim.vision_tower_lr: the vision_tower is frozen "
            "(actor.model.freeze_vision_tower); set it null, or train it"
        )
    if actor.fsdp_config.cpu_offload and on_cpu:
        yield (
            "actor.fsdp_config.cpu_offload: true with cluster.device=cpu has nothing to offload; "
            "set it false"
        )
    if actor.enable_offload and on_cpu:
        yield (
            "actor.enable_offload: true with cluster.device=cpu has nowhere to move weights to; "
            "set it false"
        )
    if actor.enable_offload and actor.fsdp_config.cpu_offload:
        yield (
            "actor.enable_offload: true and actor.fsdp_config.cpu_offload: true do the same at "
            "two times; set one false"
        )
    if actor.fsdp_config.mixed_precision.param_dtype == "fp16":
        key = "actor.fsdp_config.mixed_precision.param_dtype"
        yield f"{key}: fp16 needs a loss scaler, and there is none: small gradients would vanish; use bf16"


def _lora(config: Config) -> Iterator[str]:
    """Yield settings that contradict LoRA adapters, or that adapters don't support."""
    model, lora = config.actor.model, config.actor.model.lora
    for key, contradicts in (
        ("freeze_vision_tower: false", not model.freeze_vision_tower),
        ("freeze_projector: false", model.freeze_projector is False),
        ("freeze_language_model: true", model.freeze_language_model),
    ):
        if contradicts:
            yield (
                f"actor.model.{key} with actor.model.is_lora=true: only adapters are trained, "
                "those in actor.model.lora.target_modules (language, vision, projector, …); leave "
                "it out"
            )
    # A broken expression would otherwise fail in every rank, after the model was loaded.
    for key in ("target_modules", "exclude_modules"):
        for entry in getattr(lora, key):
            try:
                re.compile(entry)
            except re.error as error:
                yield (
                    f"actor.model.lora.{key}: {entry!r} is no regular expression ({error}); write "
                    "it as in .*q_proj"
                )
    if not lora.target_modules:
        yield (
            "actor.model.lora.target_modules: empty; name language, vision, projector, all-linear "
            "or modules"
        )
    if config.actor.fsdp_config.gradient_checkpointing_use_reentrant:
        yield (
            "actor.fsdp_config.gradient_checkpointing_use_reentrant: true with "
            "actor.model.is_lora=true: the reentrant variant has no gradients behind embeddings "
            "that are not trained; set it false"
        )
    if lora.quantization == "nf4":
        yield from _nf4(config)
    if lora.sync == "adapters" and config.rollout.rollout_backend == "sglang":
        yield (
            "actor.model.lora.sync: adapters with rollout.rollout_backend=sglang: SGLang loads "
            "adapters by name, for its language model only, and no weight sync reaches them; set "
            "it to merged, or the backend to torch"
        )


def _nf4(config: Config) -> Iterator[str]:
    """Yield settings that quantized weights don't support."""
    lora = config.actor.model.lora
    if (size := config.actor.fsdp_config.expert_parallel_size) > 1:
        yield (
            f"actor.fsdp_config.expert_parallel_size: {size} with actor.model.lora."
            "quantization=nf4: every rank has quantized weights whole; set it 1, or "
            "quantization none"
        )
    if lora.sync == "adapters":
        yield (
            "actor.model.lora.quantization: nf4 with actor.model.lora.sync=adapters: engines have "
            "no quantized model to apply them to; set merged, or quantization none"
        )
    if config.actor.fsdp_config.cpu_offload:
        yield (
            "actor.model.lora.quantization: nf4 with actor.fsdp_config.cpu_offload=true: "
            "FSDP2 does not move packed weights; set cpu_offload=false, or quantization none"
        )
