"""A model without its weights: its shape, from its folder, the hub's cache or a table of common models, and its traces."""

import copy
import json
import math
from collections.abc import Collection
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from rlinf_vl.code import is_code
from rlinf_vl.config.schema import Config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.families import Family, family_at, family_of
from rlinf_vl.models.loading import DTYPES, checkpoint_blocks, part_of, use_packed_attention
from rlinf_vl.models.lora import LoraSettings, adapters, engine_weights, train_parts
from rlinf_vl.preflight.trace import Trace, pretend_cuda, trace_images, trace_step

#: config.json of common hub models, as far as it decides on memory.
KNOWN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known_models.json").read_text())
#: More tokens in a micro-batch are not even traced, which would take as many steps of the CPU.
MOST_TOKENS = 2**21


class Model:
    """A config's model: its shape, numbers of parameters, and traces at any budget."""

    def __init__(self, config: Config, path: str | None = None) -> None:
        """`path`: of the checkpoint where it isn't the config's own name (the toy's)."""
        rollout, fsdp = config.rollout.model, config.actor.fsdp_config
        self.path = path or rollout.model_path
        self.shape, self.said = model_config(self.path, trust_remote_code=rollout.trust_remote_code)
        paths = config.actor.model.vlm.paths
        named = rollout.model_type if is_code(rollout.model_type) else self.shape.model_type
        files = config.runner.code_files
        self.family = family_at(self.shape, paths) if paths else family_of(named, files=files)
        self._made = meta_model(
            self.shape,
            self.family,
            DTYPES[fsdp.mixed_precision.param_dtype],
            frozen=config.actor.model.frozen_parts,
            checkpointing=fsdp.gradient_checkpointing,
            lora=config.actor.model.adapters,
        )
        lora = config.actor.model.lora
        quantized = config.actor.model.is_lora and lora.quantization != "none"
        self.weights = Weights(self._made, self.family, merged=lora.sync == "merged", quantized=quantized)
        #: Bytes of each weight in a rank, but for adapters, which have 4, and quantized ones.
        self.stored = self._made.dtype.itemsize if config.actor.model.is_lora else 4
        self._config = config

    @cached_property
    def teacher(self) -> "Weights | None":
        """Of the model that teaches this one, if any."""
        if (path := self._config.algorithm.distillation.teacher_path) is None:
            return None
        whole = copy.deepcopy(self._config)
        whole.actor.model.is_lora = False
        return Model(whole, path).weights

    @cache  # noqa: B019  # a model or two in a process
    def step(self, tokens: int) -> Trace:
        """`trace_step` on CUDA, of a rank's part of a row of so many tokens."""
        if tokens > MOST_TOKENS:
            raise ConfigError(
                f"runner.max_tokens_per_mbs: {tokens} tokens in a micro-batch are more than any GPU holds; set it to "
                "16384, or to what 'python -m rlinf_vl preflight' then says is the largest that fits"
            )
        longest, chunk = self._config.runner.seq_length, self._config.actor.logprob_chunk_tokens
        with pretend_cuda():
            own = -(-tokens // self._config.actor.context_parallel_size)
            return trace_step(self._made, self.family, own, longest=longest, chunk=chunk)

    @cache  # noqa: B019
    def images(self, tokens: int) -> Trace:
        """`trace_images` on CUDA, of so many tokens."""
        with pretend_cuda():
            return trace_images(self._made, self.family, tokens, self._config.data.max_prompt_length)


def model_config(path: str, *, trust_remote_code: bool = False) -> tuple[PretrainedConfig, str]:
    """(transformers config of the model at `path`, where it is from). Nothing is downloaded.

    Raises:
        ConfigError: there is no such folder, the hub's cache has none of that name, and neither has `KNOWN`.
    """
    if path in TOYS:
        from rlinf_vl.toy.model import toy_config
        from rlinf_vl.toy.task import toy_of

        return toy_config(toy_of(path)), "the toy's own"
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        return config, "its config.json" if Path(path).is_dir() else "the hub's cache"
    except (OSError, ValueError) as error:
        known = KNOWN.get(path.replace("-Thinking", "-Instruct"))  # of one shape
        if known is None:
            raise ConfigError(
                f"rollout.model.model_path: no config.json at {path!r}, in the folder or the hub's cache; fetch it with "
                f"'hf download {path} config.json', or name a folder"
            ) from error
    return AutoConfig.for_model(**copy.deepcopy(known)), "a table in rlinf_vl (not downloaded yet)"


def meta_model(
    config: PretrainedConfig,
    family: Family,
    dtype: torch.dtype,
    *,
    frozen: Collection[str],
    checkpointing: bool,
    lora: LoraSettings | None = None,
) -> PreTrainedModel:
    """The model as a rank computes it, on the meta device: shapes, and no memory."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = family.auto_model.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = use_packed_attention(model, family).train()
    train_parts(model, family, frozen, lora)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)  # adapters, as FSDP gathers them
    if checkpointing:
        checkpoint_blocks(model, family, use_reentrant=False)
    return model


class Weights:
    """What the parameters of a model come to, in numbers of elements.

    Attributes:
        total, trained, tower: of all, of those that are trained, of the vision tower (0 without one).
        quantized: sizes of those in nf4, which every rank has whole; neither `shard` nor what is said of units counts them.
        sent: of those that engines get. trains_vision: whether any part but the language model is trained.
        largest: of the largest parameter.
        root: of FSDP's root unit (embeddings, final norm, an untied head); `block`: of the largest text block;
            `tower_unit`: of the largest unit of the tower; `unit_trained`: most that are trained in one unit.
    """

    def __init__(self, model: nn.Module, family: Family, merged: bool = True, quantized: bool = False) -> None:
        """`merged`: engines get what adapters change, not the adapters. `quantized`: what has adapters is stored in nf4."""
        below = {id(model.get_parameter(name)) for name in adapters(model)} if quantized else set()

        def _numel(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters() if id(p) not in below)

        self.parameters = [p for p in model.parameters() if id(p) not in below]
        self.quantized = [p.numel() for p in model.parameters() if id(p) in below]
        blocks = [
            list(model.get_submodule(path).children()) if path else []
            for path in (family.text_blocks, family.vision_blocks)
        ]
        text_blocks, vision_blocks = ([_numel(block) for block in some] for some in blocks)
        whole = _numel(model)
        self.total = whole + sum(self.quantized)
        self.trained = _trained(model)
        self.tower = _numel(model.get_submodule(family.vision_tower)) if family.vision_tower else 0
        in_blocks = [_trained(block) for some in blocks for block in some]
        self.unit_trained = max(*in_blocks, self.trained - sum(in_blocks))
        weights = engine_weights(model, merged)
        self.sent = sum(p.numel() for _, p, adapter in weights if p.requires_grad or adapter)
        trained = (name for name, p in model.named_parameters() if p.requires_grad)
        self.trains_vision = any(part_of(name, family) != "language_model" for name in trained)
        self.largest = max([*self.quantized, *(p.numel() for p in self.parameters)])
        self.root = whole - self.tower - sum(text_blocks)
        self.block = max(text_blocks)
        self.tower_unit = max([*vision_blocks, self.tower - sum(vision_blocks)])

    def shard(self, ranks: int, trained: bool = False) -> int:
        """Elements that rank 0 of so many has: FSDP2 cuts dimension 0, the last rank's part may be short."""
        counted = [p.shape for p in self.parameters if p.requires_grad or not trained]
        return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in counted)


def _trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
