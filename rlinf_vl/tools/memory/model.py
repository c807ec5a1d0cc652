"""A model without its weights: its shape, its numbers of parameters, and its traces.

The shape is from its folder, the hub's cache or a table of common models.
"""

import copy
import math
from collections.abc import Collection
from functools import cache, cached_property

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlinf_vl.actor.mesh import ONE_UNIT
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.guidance import SELF
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.expert_modules import expert_weights, mixture_of
from rlinf_vl.models.families import family_at, family_of
from rlinf_vl.models.family import Family, submodules
from rlinf_vl.models.known import model_config
from rlinf_vl.models.loading import DTYPES, part_of, use_packed_attention
from rlinf_vl.models.lora import LoraSettings, adapters, engine_weights, train_parts
from rlinf_vl.models.recompute import Checkpointing, checkpoint_blocks
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.tools.memory.trace import (
    Trace,
    interpolated,
    pretend_cuda,
    trace_images,
    trace_step,
)
from rlinf_vl.user_code import is_code

#: Numbers of text blocks of the two traces from which deeper models are estimated: behind those that
#: take features of images.
SHALLOW = (4, 6)
#: Rows of the busiest rank's experts over those of the mean, with expert parallelism. Routers with a
#: balance loss stay below it in most layers; `actor/expert_load` is the same of single experts.
EXPERT_IMBALANCE = 1.25
#: The trace of a model that traces nothing.
NO_TRACE = Trace(0, {}, 0, 0)
#: More tokens in a micro-batch are not traced: a trace's time grows with its tokens.
MOST_TOKENS = 2**21


class Model:
    """A config's model.

    Attributes:
        shape: transformers config; `shape_source`: where it is from.
        weights: numbers of its parameters.
        stored: bytes of each weight in a rank, but for adapters, which have 4, and quantized ones.
        interpolates: whether `step` estimates traces from two of them, for a search over budgets.
        by_layers: whether `step` traces a few equal layers, and estimates the others.
        traces: whether passes are traced; otherwise they take nothing, for a lower bound.
    """

    interpolates = False
    by_layers = False
    traces = True

    def __init__(self, config: Config, path: str | None = None) -> None:
        """Make the model on the meta device.

        `path`: of the checkpoint where it isn't the config's own name (the toy's).
        """
        rollout = config.rollout.model
        self._path = path
        self.path = path or rollout.model_path
        self.shape, self.shape_source = model_config(
            self.path, trust_remote_code=rollout.trust_remote_code
        )
        paths, files = config.actor.model.vlm.paths, config.runner.code_files
        self.family = (
            family_of(rollout.model_type, files=files)
            if is_code(rollout.model_type)
            else family_at(self.shape, paths, trust_remote_code=rollout.trust_remote_code)
        )
        self._config = config
        self._meta_model, self._checkpointing = self._make()
        lora = config.actor.model.lora
        quantized = config.actor.model.is_lora and lora.quantization != "none"
        self.weights = Weights(
            self._meta_model, self.family, merged=lora.sync == "merged", quantized=quantized
        )
        self.stored = self._meta_model.dtype.itemsize if config.actor.model.is_lora else 4

    def _make(self, layers: int | None = None) -> tuple[PreTrainedModel, Checkpointing]:
        """Make the model on the meta device, and the switch of what its blocks recompute.

        `layers`: number of its text blocks; None: all.
        """
        config, shape = self._config, self.shape
        if expert_parallel_size(config) > 1:
            shape = _busiest(shape)
        if layers is not None:
            shape = copy.deepcopy(shape)
            shape.get_text_config().num_hidden_layers = layers
        model = meta_model(
            shape,
            self.family,
            DTYPES[config.actor.fsdp_config.mixed_precision.param_dtype],
            frozen=config.actor.model.frozen_parts,
            lora=config.actor.model.adapters,
            router=not config.actor.model.freeze_router,
            trust_remote_code=config.rollout.model.trust_remote_code,
        )
        return model, checkpoint_blocks(model, self.family, "none")

    @property
    def mixture(self) -> Mixture | None:
        """The model's mixtures of experts, whoever computes them; None where it has none."""
        return self.family.mixture(self.shape) or mixture_of(self._meta_model)

    @cached_property
    def teachers(self) -> "list[Weights]":
        """Numbers of each teacher's parameters."""
        teacher_config = copy.deepcopy(self._config)
        teacher_config.actor.model.is_lora = False
        paths = self._config.algorithm.distillation.labels_by_path
        return [
            Model(teacher_config, self._path if path == SELF else path).weights for path in paths
        ]

    @cache  # noqa: B019  # a model or two in a process
    def step(self, tokens: int, context: int | None = None, mode: str = "full") -> Trace:
        """Trace `trace_step` on CUDA for a rank's part of a row of `tokens`.

        Args:
            context: ranks that share the row; None: as the config says.
            mode: `actor.fsdp_config.gradient_checkpointing`; `auto` counts as full.
        """
        if tokens > MOST_TOKENS:
            raise ConfigError(
                f"runner.max_tokens_per_mbs: {tokens} tokens in a micro-batch are more than any "
                "GPU holds; set it to 16384, or to what 'rlinf-vl preflight' then says "
                "is the largest that fits"
            )
        if not self.traces:
            return NO_TRACE
        rank_tokens = -(-tokens // (context or self._config.actor.context_parallel_size))
        longest = self._config.runner.seq_length
        if self.by_layers:
            return self._trace_by_layers(rank_tokens, mode)
        if not self.interpolates:
            return self._trace(rank_tokens, mode)
        # The longest sequence and four of them: memory is linear in tokens between.
        low, high = (n * max(512, longest // 512 * 512) for n in (1, 4))
        shortest, longest_trace = (self._trace_by_layers(n, mode) for n in (low, high))
        return interpolated(shortest, longest_trace, low, high, rank_tokens)

    @cache  # noqa: B019
    def _trace_by_layers(self, rank_tokens: int, mode: str) -> Trace:
        """Trace a few layers, and others like them by the line through two traces.

        Memory and operations are linear in equal layers, behind those that differ.
        """
        text = self.shape.get_text_config()
        differing = getattr(text, "layer_types", None) or getattr(text, "mlp_only_layers", None)
        if differing or text.num_hidden_layers <= SHALLOW[1]:
            return self._trace(rank_tokens, mode)
        shallow_trace, deeper_trace = (self._trace(rank_tokens, mode, layers) for layers in SHALLOW)
        return interpolated(shallow_trace, deeper_trace, *SHALLOW, text.num_hidden_layers)

    @cache  # noqa: B019
    def _shallow(self, layers: int) -> tuple[PreTrainedModel, Checkpointing]:
        return self._make(layers)

    @cache  # noqa: B019
    def _trace(self, rank_tokens: int, mode: str, layers: int | None = None) -> Trace:
        longest = self._config.runner.seq_length
        model, checkpointing = (
            (self._meta_model, self._checkpointing) if layers is None else self._shallow(layers)
        )
        with pretend_cuda():
            checkpointing.mode = mode if mode != "auto" else "full"
            return trace_step(model, self.family, rank_tokens, longest=longest)

    @cache  # noqa: B019
    def images(self, tokens: int) -> Trace:
        """Trace `trace_images` on CUDA for `tokens`."""
        if not self.traces:
            return NO_TRACE
        if not self.interpolates:
            return self._trace_images(tokens)
        low, high = 2048, 8192
        traces = self._trace_images(low), self._trace_images(high)
        return interpolated(*traces, low, high, tokens)

    @cache  # noqa: B019
    def _trace_images(self, tokens: int) -> Trace:
        with pretend_cuda():
            return trace_images(
                self._meta_model, self.family, tokens, self._config.data.max_prompt_length
            )


def expert_parallel_size(config: Config) -> int:
    """Return the number of ranks that share the experts."""
    return getattr(config.actor.fsdp_config, "expert_parallel_size", 1)


def _busiest(shape: PretrainedConfig) -> PretrainedConfig:
    """Return a shape whose tokens go to more experts: as many as the busiest rank has rows for.

    With expert parallelism a rank has the rows of all tokens that chose its experts, at times more
    than its own tokens' number of them.
    """
    shape = copy.deepcopy(shape)
    text = shape.get_text_config()
    text.num_experts_per_tok = math.ceil(EXPERT_IMBALANCE * text.num_experts_per_tok)
    return shape


def meta_model(
    config: PretrainedConfig,
    family: Family,
    dtype: torch.dtype,
    *,
    frozen: Collection[str],
    lora: LoraSettings | None = None,
    router: bool = True,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Make the model as a rank computes it, on the meta device: shapes, and no memory.

    `router`: whether the routers of mixtures are trained.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = family.model_class.from_config(
            config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )
    model = use_packed_attention(model, family).train()
    train_parts(model, family, frozen, lora, router=router)
    for weight in model.parameters():
        # Adapters, too, in the dtype in which FSDP gathers them.
        weight.data = weight.data.to(dtype)
    return model


class Weights:
    """Numbers of elements of a model's parameters.

    Attributes:
        total: of all parameters; `trained`: of those that are trained; `tower`: of the vision tower
            (0 without one).
        quantized: sizes of the parameters in nf4, which every rank has whole; neither `shard` nor
            the numbers of units count them.
        engine_elements: of the parameters that engines get.
        trains_vision: whether any part but the language model is trained.
        largest: of the largest parameter.
        root: of FSDP's root unit (embeddings, final norm, an untied head); `block`: of the largest
            text block; `tower_unit`: of the largest unit of the tower; `unit_trained`: the most
            that are trained in one unit.
        experts: of the experts' weights; `trained_experts`: of those that are trained;
            `block_experts` and `block_trained_experts`: of those of one text block.
    """

    def __init__(
        self, model: nn.Module, family: Family, merged: bool = True, quantized: bool = False
    ) -> None:
        """Count the parameters.

        Args:
            merged: engines get the weights that adapters change, not the adapters.
            quantized: weights that have adapters are stored in nf4.
        """
        quantized_ids = (
            {id(model.get_parameter(name)) for name in adapters(model)} if quantized else set()
        )

        def _numel(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters() if id(p) not in quantized_ids)

        self.parameters = [p for p in model.parameters() if id(p) not in quantized_ids]
        self.quantized = [p.numel() for p in model.parameters() if id(p) in quantized_ids]
        text_modules, vision_modules = (
            _children(model, family.text_blocks),
            _children(model, family.vision_blocks),
        )
        text_blocks = [_numel(block) for block in text_modules]
        vision_blocks = [_numel(block) for block in vision_modules]
        unquantized = _numel(model)
        self.total = unquantized + sum(self.quantized)
        self.trained = _trained(model)
        self.tower = _numel(model.get_submodule(family.vision_tower)) if family.vision_tower else 0
        in_blocks = [_trained(block) for block in (*text_modules, *vision_modules)]
        self.unit_trained = max([*in_blocks, self.trained - sum(in_blocks)])
        weights = engine_weights(model, merged)
        self.engine_elements = sum(
            p.numel() for _, p, adapter in weights if p.requires_grad or adapter
        )
        trained = (name for name, p in model.named_parameters() if p.requires_grad)
        self.trains_vision = any(part_of(name, family) != "language_model" for name in trained)
        self.largest = max([*self.quantized, *(p.numel() for p in self.parameters)])
        self.root = unquantized - self.tower - sum(text_blocks)
        self.block = max(text_blocks)
        self.tower_unit = max([*vision_blocks, self.tower - sum(vision_blocks)])
        by_unit = _experts_by_unit(model, family, quantized_ids)
        self.experts, self.trained_experts = (sum(sizes) for sizes in zip(*by_unit, strict=True))
        self.block_experts, self.block_trained_experts = max(by_unit)

    @cache  # noqa: B019  # as many as models
    def shard(self, ranks: int, trained: bool = False) -> int:
        """Return the elements that rank 0 of `ranks` has.

        FSDP2 cuts dimension 0, so the last rank's part may be shorter. With expert parallelism the
        same rank has as many: its experts are shared by fewer ranks.
        """
        shapes = [p.shape for p in self.parameters if p.requires_grad or not trained]
        return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)


def _experts_by_unit(model: nn.Module, family: Family, ignored: set[int]) -> list[tuple[int, int]]:
    """Return the elements of experts' weights in each FSDP unit, as `Mesh.shard` makes them: of all,
    and of those that are trained."""
    experts = {id(p) for p in expert_weights(model).values()}
    counted = set(ignored)
    small = sum(p.numel() for p in model.parameters()) <= ONE_UNIT
    paths = () if small else family.fsdp_units
    sizes = []
    for unit in [*(unit for path in paths for unit in submodules(model, path)), model]:
        parameters = [p for p in unit.parameters() if id(p) not in counted]
        counted.update(map(id, parameters))
        of_experts = [p for p in parameters if id(p) in experts]
        trained = sum(p.numel() for p in of_experts if p.requires_grad)
        sizes.append((sum(p.numel() for p in of_experts), trained))
    return sizes


def _children(model: nn.Module, path: str | None) -> list[nn.Module]:
    """Return the children of the module at `path`; none without a path."""
    return list(model.get_submodule(path).children()) if path else []


def _trained(module: nn.Module) -> int:
    """Return the number of elements that are trained in a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
