"""Keys of `actor`: the trainer."""

from dataclasses import dataclass, field
from math import lcm

from rlinf_vl.config.schema.limits import (
    AT_LEAST_1,
    DECAY,
    DTYPES,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    SHARE,
    TRUE_FALSE_OR_AUTO,
    key,
)


@dataclass
class LoraConfig:
    rank: int = key(16, AT_LEAST_1)
    """Rank of every adapter."""
    alpha: float = key(32.0, POSITIVE)
    """An adapter's product is scaled by alpha / rank."""
    dropout: float = key(0.0, DECAY)
    """Share of an adapter's inputs that is dropped while it trains."""
    target_modules: list[str] = field(default_factory=lambda: ["language"])
    """Modules with adapters. Each entry is a part (language, vision, projector, or all-linear for
    all three), the end of a module's path (q_proj, self_attn.q_proj) or a regular expression for
    the whole path. Experts count as linear modules."""
    exclude_modules: list[str] = field(default_factory=list)
    """Modules among them without adapters, written in the same form."""
    sync: str = key("merged", ("merged", "adapters"))
    """Weights sent to engines: merged (weights with the adapters added) or adapters (which the
    torch engine applies itself)."""
    quantization: str = key("none", ("none", "nf4"))
    """How the linear modules that have adapters are stored: none (param_dtype), or nf4 (QLoRA: 4
    bits, all of them in every rank), which needs bitsandbytes."""


@dataclass
class VlmConfig:
    """The places of a model's parts, for a model type that rlinf_vl does not know: set both keys,
    or neither."""

    vision_encoder_attr: str | None = None
    """Dotted path of the vision tower in the transformers model, such as model.visual."""
    language_model_attr: str | None = None
    """Dotted path of the text model, such as model.language_model."""

    @property
    def paths(self) -> tuple[str, str] | None:
        vision, language = self.vision_encoder_attr, self.language_model_attr
        return None if vision is None or language is None else (vision, language)


@dataclass
class ActorModelConfig:
    variable_seq_lengths: bool = True
    """true: micro-batches have the length of what is in them; false: padded to max_tokens_per_mbs
    (static shapes)."""
    is_lora: bool = False
    """Train LoRA adapters (actor.model.lora) and leave every weight of the model as it is."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze_vision_tower: bool = True
    """Leave the vision tower as it is: images are then encoded once per step."""
    freeze_projector: bool | None = None
    """Leave the projector, which makes tokens of the tower's patches, as it is; null: as the vision
    tower."""
    freeze_language_model: bool = False
    """Leave the language model, embeddings and head included, as it is."""
    freeze_router: bool = True
    """Leave the routers of mixtures of experts as they are: experts learn without that, and a
    router that moves sends more tokens elsewhere than the engine did."""
    router_aux_loss_coef: float = key(0.0, NOT_NEGATIVE)
    """Weight of the load-balancing loss of mixtures of experts (Fedus et al. 2021), over all tokens
    and layers of a mini-batch as transformers computes it; needs freeze_router: false. 0 is off;
    above, a pass before each optimizer step counts experts."""
    vlm: VlmConfig = field(default_factory=VlmConfig)

    @property
    def adapters(self) -> LoraConfig | None:
        """Settings of the adapters, if there are any."""
        return self.lora if self.is_lora else None

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """The parts of the model (`rlinf_vl.models.loading.PARTS`) whose own weights are not
        trained."""
        frozen = {
            "language_model": self.freeze_language_model,
            "projector": self.freeze_vision_tower
            if self.freeze_projector is None
            else self.freeze_projector,
            "vision_tower": self.freeze_vision_tower,
        }
        return tuple(part for part, is_frozen in frozen.items() if is_frozen)


@dataclass
class MixedPrecisionConfig:
    param_dtype: str = key("bf16", DTYPES)
    """Dtype of compute; master weights are float32."""
    reduce_dtype: str = key("fp32", DTYPES)
    """Dtype of gradient reduction."""


@dataclass
class FsdpConfig:
    strategy: str = key("fsdp2", ("fsdp2", "hsdp"))
    """fsdp2: every rank has a share of the weights and of the optimizer's state. hsdp: the ranks of
    each node have the whole between them, so that weights are gathered inside a node and only
    gradients cross nodes: faster, for more memory."""
    gradient_checkpointing: str = key("auto", ("auto", "full", "mlp", "selective", "none"))
    """Which activations of each block backward recomputes. full (or true): all, from the block's
    input. mlp: all but attention and its projections. selective: norms, rotations, activations and
    the like; the outputs of attention and of linear layers are kept. none (or false): nothing.
    auto: the first of none, selective, mlp and full with which training leaves a twentieth of the
    run's GPUs free, by the memory ledger; none on a CPU."""
    gradient_checkpointing_use_reentrant: bool = False
    """torch.utils.checkpoint's variant."""
    reshard_after_forward: bool | str = key("auto", TRUE_FALSE_OR_AUTO)
    """Free a block's gathered weights after its forward, and gather them again for its backward
    (ZeRO-3). false keeps them and the whole gradient through all micro-batches of an optimizer step
    (ZeRO-2): faster, for more memory. auto: false where that leaves a twentieth of the run's GPUs
    free, too; true on a CPU."""
    expert_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks that share out the experts of each mixture: each has some experts whole, and tokens go
    to the ranks of their experts instead of experts to the ranks of their tokens. Divides the
    model's experts and the ranks of actor (with hsdp: those of a node). 1 is off."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (CUDA only)."""
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)


@dataclass
class OptimConfig:
    lr: float = key(1e-6, POSITIVE)
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = key(0, NOT_NEGATIVE)
    """Optimizer steps of linear warm-up."""
    lr_scheduler: str = key("constant", ("constant", "linear", "cosine"))
    """constant, linear or cosine (to min_lr_ratio, over the run's optimizer steps)."""
    lr_cooldown_steps: int = key(0, NOT_NEGATIVE)
    """Optimizer steps at the end of the run over which the learning rate falls linearly to
    min_lr_ratio, where lr_scheduler has it higher. With constant: warm-up, plateau and decay."""
    min_lr_ratio: float = key(0.0, SHARE)
    """Learning rate at the end of linear, cosine and lr_cooldown_steps, as a share of lr."""
    adam_beta1: float = key(0.9, DECAY)
    """AdamW's first-moment decay."""
    adam_beta2: float = key(0.999, DECAY)
    """AdamW's second-moment decay."""
    adam_eps: float = key(1e-8, POSITIVE)
    """AdamW's epsilon."""
    weight_decay: float = key(0.0, NOT_NEGATIVE)
    """AdamW's decoupled weight decay."""
    clip_grad: float = key(1.0, POSITIVE_OR_INFINITE)
    """Global gradient norm is clipped to this."""
    vision_tower_lr: float | None = key(None, POSITIVE)
    """Peak learning rate of the vision tower, if it is trained; null: lr."""


@dataclass
class ActorConfig:
    micro_batch_size: int = key(1, AT_LEAST_1)
    """Trajectories per micro-batch when runner.enable_dynamic_batch_size is false."""
    enable_offload: bool = False
    """Keep weights and optimizer state in host memory while collocated engines generate (CUDA
    only)."""
    context_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks that share each micro-batch's tokens, for trajectories too long for one rank's memory:
    each has a part of the tokens, and in attention a part of the heads. Divides the ranks of actor
    in cluster.component_placement and the model's heads; the other ranks share out the
    trajectories. runner.max_tokens_per_mbs is that of all of them together."""
    routing_replay: str = key("off", ("off", "record", "replay"))
    """Experts that tokens go to, in mixtures. off: those that the trainer's router chooses. record:
    the engine reports those its router chose, and actor/routing_disagreement compares. replay: the
    trainer takes the engine's (R3, Ma et al. 2025), for old logprobs and in the loss, and weighs
    them by its own router; the reference model chooses by itself."""
    model: ActorModelConfig = field(default_factory=ActorModelConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def rank_multiple(self) -> int:
        """The number of which the ranks are a multiple: in groups they share rows and experts."""
        return lcm(self.context_parallel_size, self.fsdp_config.expert_parallel_size)
