"""Every configuration key of a run: one typed dataclass per section, and what each key allows by itself.

What Hydra composes from the YAML files under `examples/` is filled into these; a key that is not here is refused
(`rlinf_vl.config.load`), and a key that is here is read somewhere. The string under a field is its documentation.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import MISSING

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """A condition on one value: `must` ends the sentence "key: value must …". A null value meets every limit."""

    must: str
    holds: Callable[[Any], bool]
    may_be_infinite: bool = False


POSITIVE = Limit("be > 0", lambda x: x > 0)
POSITIVE_OR_INFINITE = Limit("be > 0", lambda x: x > 0, may_be_infinite=True)  # infinity takes the bound away
NOT_NEGATIVE = Limit("be >= 0", lambda x: x >= 0)
AT_LEAST_1 = Limit("be at least 1", lambda x: x >= 1)
OFF_OR_POSITIVE = Limit("be -1 or at least 1", lambda x: x == -1 or x >= 1)
ALL_OR_NOT_NEGATIVE = Limit("be at least 0, or -1 for all", lambda x: x >= -1)
SHARE = Limit("lie in [0, 1]", lambda x: 0 <= x <= 1)
SHARE_OR_AUTO = Limit("lie in (0, 1], or be auto", lambda x: 0 < x <= 1 if isinstance(x, float) else x == "auto")
DECAY = Limit("lie in [0, 1)", lambda x: 0 <= x < 1)
STORE_BYTES = Limit("be at least 78643200, Ray's minimum of 75 MiB", lambda x: x >= 75 * 2**20)

DTYPES = ("fp32", "bf16", "fp16")


def key(default: T, allowed: Limit | tuple[str, ...]) -> T:
    """A field whose value, or each of whose values, must meet the limit or be one of the strings."""
    return field(default_factory=lambda: copy.copy(default), metadata={"allowed": allowed})


@dataclass
class ClusterConfig:
    num_nodes: int = key(1, AT_LEAST_1)
    """Machines in the Ray cluster that the run waits for."""
    component_placement: dict[str, Any] = field(default_factory=lambda: {"actor,rollout": "all"})
    """Slots (accelerators; on CPU, processes) of each component: `actor,rollout: 0-7` shares them (collocated),
    `actor: 0-3` with `rollout: 4-7` splits them (disaggregated); `all` is every slot of the cluster."""
    device: str = key("auto", ("auto", "cpu", "cuda"))
    """auto, cpu or cuda."""
    cpu_threads: int | None = key(None, AT_LEAST_1)
    """Threads of every actor process (OMP_NUM_THREADS, and those of torch); null: 1 on CPUs, and beside GPUs a fair share of the
    host's cores, half a GPU's each, 16 at most."""
    ray_address: str | None = "auto"
    """host:port of a running Ray cluster; `auto` is RAY_ADDRESS if set, else the cluster that ray_utils/start_ray.sh started on
    this node, else a private one for this run; null is always private."""
    object_store_memory: int | None = key(None, STORE_BYTES)
    """Bytes of shared memory for a private cluster's object store; null lets Ray decide."""


@dataclass
class LoggerConfig:
    logger_backends: list[str] = key(["tensorboard"], ("tensorboard", "wandb", "trackio"))
    """Trackers beside metrics.jsonl, which is always written: tensorboard, wandb, trackio."""
    project_name: str = "rlinf_vl"
    """Project name given to wandb and trackio."""


@dataclass
class TrajectoriesConfig:
    interval: int = key(1, OFF_OR_POSITIVE)
    """Record training trajectories every so many steps, validation's every time; -1 records none."""
    train_groups: int = key(4, ALL_OR_NOT_NEGATIVE)
    """Groups recorded of a training step, chosen at random; -1 records all."""
    val_groups: int = key(64, ALL_OR_NOT_NEGATIVE)
    """Problems recorded of a validation, always the same ones; -1 records all."""
    max_gb: float = key(2.0, POSITIVE_OR_INFINITE)
    """GB of trajectories and images after which no more are recorded."""


@dataclass
class ProfileConfig:
    steps: list[int] = field(default_factory=list)
    """Training steps of which torch.profiler writes a trace (profile/step_N-rank_R.json.gz in the run's folder)."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Actor ranks that are profiled."""


@dataclass
class RunnerConfig:
    output_dir: str = "results"
    """Runs are written to ${runner.output_dir}/${runner.experiment_name}/."""
    experiment_name: str = MISSING
    """Name of the run's folder."""
    seed: int = key(1234, Limit("lie in [0, 2^63)", lambda x: 0 <= x < 2**63))  # as torch takes it
    """Seeds weights' initialisation, sampling and everything else but the data order (data.seed)."""
    seq_length: int = key(2048, AT_LEAST_1)
    """Longest trajectory in tokens: prompt with expanded image placeholders, and response."""
    enable_dynamic_batch_size: bool = True
    """Pack trajectories into micro-batches under max_tokens_per_mbs; false puts actor.micro_batch_size in each."""
    max_tokens_per_mbs: int = key(8192, AT_LEAST_1)
    """Hard upper bound of tokens in one micro-batch of one rank."""
    max_epochs: int = key(1, AT_LEAST_1)
    """Passes over the training rows; the run ends at max_steps or max_epochs, whichever comes first."""
    max_steps: int = key(-1, OFF_OR_POSITIVE)
    """Training steps; -1 leaves it to max_epochs."""
    val_check_interval: int = key(10, OFF_OR_POSITIVE)
    """Validate every so many steps, and before the first and after the last; -1 never validates."""
    weight_sync_interval: int = key(1, AT_LEAST_1)
    """Training steps between weight syncs. Above 1 the engine samples from older weights, which TIS corrects for."""
    mismatch_check_interval: int = key(20, OFF_OR_POSITIVE)
    """Compare engine and trainer logprobs, with images and with blank ones, on the first step and every so many; a blind
    or stale engine stops the run. -1 never checks."""
    save_interval: int = key(-1, OFF_OR_POSITIVE)
    """Checkpoint every so many steps, and after the last; -1 saves only a run that is told to stop."""
    keep_last: int = key(2, OFF_OR_POSITIVE)
    """Complete checkpoints kept; older ones are deleted. -1 keeps all."""
    resume_dir: str | None = None
    """null starts afresh (a used folder of this name is set aside first), `auto` takes the newest complete checkpoint of this
    run's folder, a path that checkpoint. What the config says now counts, the optimizer's settings included."""
    heartbeat_timeout: float = key(120.0, POSITIVE)
    """Seconds without an answer after which a rollout worker or an actor rank is taken for hung, and replaced."""
    max_restarts: int = key(3, NOT_NEGATIVE)
    """Times that a run starts its actor ranks again, from the last complete checkpoint, when one of them dies or hangs."""
    max_bad_steps: int = key(3, AT_LEAST_1)
    """Steps in a row with a gradient that is not finite, each of them skipped, after which the run stops."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trajectories: TrajectoriesConfig = field(default_factory=TrajectoriesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass
class SamplingConfig:
    temperature: float = key(1.0, NOT_NEGATIVE)
    """Softmax temperature; training wants > 0. The trainer divides its logits by the same number."""
    top_p: float = key(1.0, Limit("lie in (0, 1]", lambda x: 0 < x <= 1))
    """Nucleus mass; below 1 tokens are drawn from a truncated distribution, which TIS can't correct for. Logprobs, and with
    them the mismatch guard, are of the whole one, in engine and trainer alike."""
    top_k: int = key(0, NOT_NEGATIVE)
    """Most likely tokens kept; 0 keeps all."""
    max_new_tokens: int | None = key(None, AT_LEAST_1)
    """Longest response; null is runner.seq_length - data.max_prompt_length."""


@dataclass
class AlgorithmConfig:
    adv_type: str = key("grpo", ("grpo", "rloo"))
    """grpo: reward minus the group's mean. rloo: reward minus the mean of the group's others. Either is divided by the group's
    standard deviation if normalize_advantages; RLOO as published is not."""
    loss_type: str = key("actor", ("actor", "gspo"))
    """actor: the clipped policy-gradient loss of PPO, dual-clipped when clip_ratio_c is set. gspo: the same with one ratio for a
    whole sequence, the geometric mean of its tokens', which stays close to 1: clip_ratio_low and _high are then about 3e-4."""
    loss_agg_func: str = key("token-mean", ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))
    """token-mean, seq-mean-token-mean or seq-mean-token-sum, over the whole mini-batch."""
    group_size: int = key(8, AT_LEAST_1)
    """Responses sampled per problem (G)."""
    n_minibatches: int = key(1, AT_LEAST_1)
    """Optimizer steps per rollout batch."""
    normalize_advantages: bool = True
    """Divide by the group's sample standard deviation (n - 1)."""
    clip_ratio_low: float = key(0.2, NOT_NEGATIVE)
    """The probability ratio is clipped below at 1 - this."""
    clip_ratio_high: float = key(0.2, NOT_NEGATIVE)
    """The probability ratio is clipped above at 1 + this."""
    clip_ratio_c: float | None = key(None, Limit("be > 1, or null for no dual clip", lambda x: x > 1))
    """Dual clip (> 1): bounds the loss of negative advantages at -c·A; null is off."""
    kl_beta: float = key(0.0, NOT_NEGATIVE)
    """Weight of KL(policy‖reference) in the loss; 0 loads no reference model."""
    kl_penalty_type: str = key("k3", ("k1", "k2", "k3", "abs"))
    """Estimator of that KL, by what its gradient in the loss descends on: k2 (mse) KL(policy‖reference), k3 (low_var_kl)
    KL(reference‖policy), abs their total variation. k1 (kl) has an expected gradient of zero there, and is refused."""
    entropy_bonus: float = 0.0
    """Weight of the policy's entropy, subtracted from the loss."""
    recompute_logprobs: str = key("auto", ("auto", "true", "false"))
    """Where the old logprobs of the ratio come from. true: a pass of the trainer before the first optimizer step.
    auto: the same numbers, that pass made only for the mini-batches after the first. false: the engine's logprobs."""
    importance_sampling_fix: bool = True
    """Truncated importance sampling: weigh tokens by min(exp(train - rollout logprob), importance_sampling_clip)."""
    importance_sampling_clip: float = key(2.0, POSITIVE_OR_INFINITE)
    """Upper bound of those weights."""
    importance_sampling_level: str = key("token", ("token", "sequence", "geometric"))
    """token, sequence (product over the response) or geometric (its per-token mean)."""
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling during validation; one response per problem."""


@dataclass
class RolloutModelConfig:
    model_path: str = MISSING
    """Checkpoint folder (HF format) or hub name, for policy and reference; `toy` is the tiny model, warm-started on first use."""
    model_type: str = key("qwen3_vl", ("qwen3_vl",))  # rows of rlinf_vl.models.families, which imports torch
    """Model family: a row of rlinf_vl.models.families."""
    precision: str = key("bf16", DTYPES)
    """The engine's dtype: fp32, bf16 or fp16. Weights are cast to it once, before they travel."""
    trust_remote_code: bool = False
    """Allow the checkpoint's own Python code to run."""


@dataclass
class SglangConfig:
    attention_backend: str | None = None
    """SGLang's attention_backend; null leaves the choice to SGLang (on CPU: torch_native, the only one there)."""
    log_level: str = key("error", ("debug", "info", "warning", "error", "critical"))
    """How much SGLang's processes say."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's server, by their own names, over what is chosen for it."""


@dataclass
class RolloutConfig:
    rollout_backend: str = key("torch", ("torch", "sglang"))
    """Engine: torch (embedded, everywhere) or sglang (bash requirements/install.sh --sglang)."""
    tensor_parallel_size: int = key(1, AT_LEAST_1)
    """Slots that one SGLang engine spans; the torch engine takes one."""
    deterministic: bool = False
    """SGLang's batch-invariant kernels (CUDA only): a sample depends on its prompt and seed alone, at about a third of the speed."""
    request_timeout: float = key(600.0, POSITIVE)
    """Seconds after which SGLang gives up one request; it is then an error of its group."""
    weight_sync: str = key("auto", ("auto", "object_store", "broadcast", "shared_memory"))
    """How weights reach the engines: object_store (through Ray, everywhere), broadcast (from actor rank 0, by NCCL on CUDA and
    gloo on the CPU), shared_memory (of the same GPU by CUDA IPC; on the CPU, of the same node). auto: shared_memory where every
    engine has an actor rank on its slots; otherwise on CUDA broadcast if no engine has one; otherwise object_store."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    return_logprobs: bool = True
    """Keep the engine's logprobs on every trajectory (needed by TIS and by the rollout/train metrics)."""
    gpu_memory_utilization: float | str = key(0.6, SHARE_OR_AUTO)
    """Share of a GPU's memory for the engine's weights and KV cache; on CPU, of free memory, and what is unused is not
    reserved. `auto`: what the memory ledger leaves beside the trainer (`python -m rlinf_vl preflight`); 0.6 on CPU."""
    max_running_requests: int = key(256, AT_LEAST_1)
    """Responses decoded at once by one worker; further ones wait."""
    model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    env_class: str = key("single_turn", ("single_turn",))
    """Environment, by its registered name."""


@dataclass
class DataConfig:
    train_data_paths: list[str] = MISSING
    """Files (parquet, json, jsonl), HF dataset folders or hub names (hf://owner/name[:split]); `toy` is the embedded task."""
    val_data_paths: list[str] = field(default_factory=list)
    """The same, for validation."""
    prompt_key: str = "problem"
    """Column of the question; `<image>` in it marks where an image stands."""
    answer_key: str = "answer"
    """Column of the reference answer, with or without \\boxed{}."""
    image_keys: list[str] = field(default_factory=lambda: ["images"])
    """Columns that hold images, in order; [] for text only."""
    system_prompt: str | None = None
    """System message put before every problem."""
    prompt_suffix: str = ""
    """Text appended to every question, such as the answer format asked for."""
    max_prompt_length: int = key(1024, AT_LEAST_1)
    """Longest prompt in tokens, image placeholders expanded."""
    filter_prompt_by_length: bool = True
    """Leave rows with longer prompts out before training; false counts them as bad (max_bad_rows)."""
    rollout_batch_size: int = key(32, AT_LEAST_1)
    """Problems per training step."""
    val_samples: int = key(-1, OFF_OR_POSITIVE)
    """Validation rows used (the first so many); -1 uses all."""
    shuffle: bool = True
    """Shuffle the training rows anew every epoch."""
    seed: int = key(1234, NOT_NEGATIVE)
    """Seeds the order."""
    image_min_pixels: int | None = key(None, AT_LEAST_1)
    """Smallest image area after resizing; null is the checkpoint's own. One setting for engine and trainer."""
    image_max_pixels: int | None = key(None, AT_LEAST_1)
    """Largest image area after resizing; null is the checkpoint's own."""
    blank_images: bool = False
    """Diagnostic: replace every image by a blank one of its size. What is still learned is not seen."""
    image_hosts: list[str] = field(default_factory=list)
    """Hosts that images given as http(s) URLs are fetched from, redirects included, by name without port; each is kept in the
    cache folder (RLINF_VL_CACHE) from then on. [] fetches nothing: such a row is bad."""
    max_bad_rows: float = key(0.05, SHARE)
    """Share of a split's rows, 0 to 1, that may be unusable (each is listed with its reason in bad_rows.jsonl of the run
    folder); beyond it the run stops and says why. 0 stops at the first, 1 never."""


@dataclass
class ActorModelConfig:
    variable_seq_lengths: bool = True
    """true: micro-batches have the length of what is in them; false: padded to max_tokens_per_mbs (static shapes)."""
    is_lora: bool = False
    """LoRA adapters; not available yet, true is refused."""
    freeze_vision_tower: bool = True
    """Train the language model only."""


@dataclass
class MixedPrecisionConfig:
    param_dtype: str = key("bf16", DTYPES)
    """Dtype of compute; master weights are float32."""
    reduce_dtype: str = key("fp32", DTYPES)
    """Dtype of gradient reduction."""


@dataclass
class FsdpConfig:
    strategy: str = key("fsdp2", ("fsdp2", "hsdp"))
    """fsdp2: every rank has a share of the weights and of the optimizer's state. hsdp: the ranks of each node have the whole
    between them, so that weights are gathered inside a node and only gradients cross nodes: faster, for more memory."""
    gradient_checkpointing: bool = True
    """Recompute activations per block in backward."""
    gradient_checkpointing_use_reentrant: bool = False
    """torch.utils.checkpoint's variant."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward, and gather them again for its backward (ZeRO-3). false keeps them
    and the whole gradient through all micro-batches of an optimizer step (ZeRO-2): faster, for more memory."""
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
    min_lr_ratio: float = key(0.0, SHARE)
    """Learning rate at the end of linear and cosine, as a share of lr."""
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


@dataclass
class ActorConfig:
    micro_batch_size: int = key(1, AT_LEAST_1)
    """Trajectories per micro-batch when runner.enable_dynamic_batch_size is false."""
    enable_offload: bool = False
    """Keep weights and optimizer state in host memory while collocated engines generate (CUDA only)."""
    share_prompts: bool = True
    """A group's prompt stands once in a micro-batch, for all its responses; false repeats it for each. The loss is the same."""
    vision_cache_gb: float = key(4.0, NOT_NEGATIVE)
    """Image features of a frozen vision tower kept on the device, in GiB; what a step needs beyond that is kept in host
    memory. Each image is then encoded once per step at most, and again only after its features had to go."""
    logprob_chunk_tokens: int | None = key(None, AT_LEAST_1)
    """Response positions whose logits exist at once; null: as many as fit 16 MiB on the CPU, 1 GiB on CUDA, and 128 at least."""
    model: ActorModelConfig = field(default_factory=ActorModelConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class RewardConfig:
    reward_type: str = key("math", ("math",))
    """Grader: math (rlinf_vl.rewards.grade_math on the last \\boxed{})."""
    reward_max_val: float = 1.0
    """Reward of a right answer."""
    reward_min_val: float = 0.0
    """Reward of a wrong one."""


@dataclass
class Config:
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
