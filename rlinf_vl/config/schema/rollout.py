"""Keys of `rollout`: the engine and the environment."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from rlinf_vl.config.schema.limits import (
    AT_LEAST_1,
    DTYPES,
    FAMILIES,
    POSITIVE,
    SHARE_OR_AUTO,
    OrCode,
    key,
)


@dataclass
class RolloutModelConfig:
    model_path: str = MISSING
    """Checkpoint folder (HF format) or hub name, for policy and reference; or an embedded task
    (`toy`), for its tiny model."""
    model_type: str = key("auto", OrCode(("auto", *FAMILIES), "model family", "Family"))
    """Model family; auto: the one that the checkpoint's config.json names. Or a `Family` of yours,
    path/to/file.py:FAMILY."""
    precision: str = key("bf16", DTYPES)
    """The engine's dtype: fp32, bf16 or fp16. Weights are cast to it once, before they travel."""
    trust_remote_code: bool = False
    """Allow the checkpoint's own Python code to run."""


@dataclass
class SglangConfig:
    attention_backend: str | None = None
    """SGLang's attention_backend; null leaves the choice to SGLang (on CPU: torch_native, the only
    one there)."""
    log_level: str = key("error", ("debug", "info", "warning", "error", "critical"))
    """How much SGLang's processes say."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's server, by their own names, over what is chosen for it."""


@dataclass
class ThinkingConfig:
    mode: str = key("auto", ("auto", "on", "off"))
    """Whether the model thinks before it answers, told to its chat template as enable_thinking;
    auto says nothing. on and off are refused where the template doesn't know that."""
    budget: int | None = key(None, AT_LEAST_1)
    """Most tokens of a thought, its `<think>` included. One that has used them up is closed with
    `</think>`, which is not sampled and carries no loss, and the answer goes on within
    max_new_tokens. null: no limit but max_new_tokens."""


@dataclass
class RolloutConfig:
    rollout_backend: str = key("torch", ("torch", "sglang"))
    """Engine: torch (embedded, everywhere) or sglang (bash requirements/install.sh --sglang)."""
    tensor_parallel_size: int = key(1, AT_LEAST_1)
    """Slots that one SGLang engine spans; the torch engine takes one."""
    deterministic: bool = False
    """SGLang's batch-invariant kernels (CUDA only): a sample depends on its prompt and seed alone,
    at about a third of the speed."""
    request_timeout: float = key(600.0, POSITIVE)
    """Seconds after which SGLang gives up one request; it is then an error of its group."""
    weight_sync: str = key("auto", ("auto", "delta", "object_store", "broadcast", "shared_memory"))
    """How weights reach the engines: delta (through Ray, everywhere: what changed of each rank's
    shard; the first sync is whole), object_store (through Ray, whole), broadcast (from actor rank
    0, by NCCL on CUDA and gloo on the CPU), shared_memory (of the same GPU by CUDA IPC; on the CPU,
    of the same node). auto: shared_memory where every engine has an actor rank on its slots;
    otherwise on CUDA broadcast if no engine has one; otherwise delta."""
    kv_after_update: str = key("recompute", ("recompute", "keep"))
    """Treatment of the keys and values of running responses when weights arrive. recompute:
    the new weights compute them again, so that every logprob is what the trainer computes for the
    weights that sampled the token. keep: they stay; nothing is computed twice, and no single
    version of the weights gives these logprobs (SGLang then decodes without its overlap schedule).
    The same goes for what an episode's later turns continue. Other episodes never use what former
    weights have computed."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    return_logprobs: bool = True
    """Keep the engine's logprobs on every trajectory (needed by TIS and by the rollout/train
    metrics)."""
    gpu_memory_utilization: float | str = key(0.6, SHARE_OR_AUTO)
    """Share of a GPU's memory for the engine's weights and KV cache; on CPU, of free memory, and
    what is unused is not reserved. `auto`: what the memory ledger leaves beside the trainer
    (`python -m rlinf_vl preflight`); 0.6 on CPU."""
    max_running_requests: int = key(256, AT_LEAST_1)
    """Responses decoded at once by one worker; further ones wait."""
    model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    thinking: ThinkingConfig = field(default_factory=ThinkingConfig)
    env_class: str = key("single_turn", OrCode())
    """Environment: a registered name (single_turn), module:Class, or path/to/file.py:Class, whose
    text travels to the workers. A row's column env_class names that row's own."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the environment's constructor. A value `@path` is replaced by the text of that
    file (relative to the working folder, or else to the examples). A row's column env_kwargs has
    further ones, over these."""
    max_turns: int | None = key(None, AT_LEAST_1)
    """Most answers of an episode, which then ends; null leaves it to the environment and to
    runner.seq_length."""
    max_concurrent_rollouts: int | None = key(None, AT_LEAST_1)
    """Most episodes under way in one worker, so that not all environments are open at once; null
    for all."""
    turn_timeout: float = key(60.0, POSITIVE)
    """Seconds that an environment has for one call (start, step, close). One that takes longer is
    an error of its trajectory."""
    episode_timeout: float | None = key(None, POSITIVE)
    """Seconds that an episode may take, waiting for the engine included; one that takes longer is
    an error. null: no limit."""
    faults: str = key("mask", ("mask", "penalize"))
    """Treatment of a trajectory whose environment failed or ran out of time. mask: it is left out,
    also of its group's baseline. Longer episodes fail more often, so this favours short ones.
    penalize: it gets reward.reward_min_val and is trained on with the turns that it has, so the
    policy learns to avoid what fails, its own doing or not. Faults of the engine, of rows and of
    reward functions are always masked. A validation counts any of them as an error and a wrong
    answer."""
