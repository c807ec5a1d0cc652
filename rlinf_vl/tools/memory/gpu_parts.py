"""Count what a rank and an engine hold of a GPU, phase by phase, in bytes.

Weights, gradients and optimizer are counted by closed forms of FSDP2's sharding, activations by
`rlinf_vl.tools.memory.trace`. The constants below stand for what can't be measured beforehand. The
phases are those of `rlinf_vl.tools.memory.ledger`.
"""

import math

from rlinf_vl.config.schema import Config
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.models.nf4 import BITS
from rlinf_vl.models.vision_cache import TRAINER_BYTES
from rlinf_vl.tools.memory.model import EXPERT_IMBALANCE, Model, expert_parallel_size
from rlinf_vl.weights.strategy import Strategy

GIB = 2**30
MIB = 2**20
#: A process's CUDA context with the kernels of PyTorch, cuBLAS and NCCL loaded: 0.4 to 0.6 GiB by
#: published accounts.
CONTEXT_BYTES = int(0.6 * GIB)
#: NCCL's buffers for one communicator of a rank.
NCCL_BYTES = int(0.3 * GIB)
#: Share of a training step's passing memory that PyTorch's allocator keeps beside it, in blocks of
#: other sizes.
FRAGMENTATION = 0.1
#: Memory that the allocator keeps after `empty_cache`: segments that living tensors share with
#: freed ones.
RESIDUE_BYTES = int(0.5 * GIB)
#: The parts of a phase, in the order of the table: a rank's, then an engine's.
PARTS = (
    "rank context",
    "parameters",
    "4-bit weights",
    "reference",
    "teacher",
    "optimizer",
    "gradients",
    "gathered weights",
    "activations",
    "expert exchange",
    "gradients in flight",
    "buckets in flight",
    "vision cache",
    "allocator",
    "engine contexts",
    "engine weights",
    "KV cache",
    "CUDA graphs",
    "workspace",
)
#: Bytes by part.
Parts = dict[str, int]


def rank_parts(
    config: Config, model: Model, ranks: int, shard: int, strategy: Strategy
) -> dict[str, Parts]:
    """Return the parts of an actor rank by phase; every `shard` ranks share the weights."""
    fsdp, weights, actor = config.actor.fsdp_config, model.weights, config.actor
    compute, _ = _itemsizes(config)
    on_device = 0 if fsdp.cpu_offload else 1
    keeps_gathered = not fsdp.reshard_after_forward or ranks == 1
    trained, quantized = weights.shard(shard, trained=True), sum(weights.quantized)
    # Trained weights are float32.
    shards = {
        "parameters": (model.stored * (weights.shard(shard) - trained) + 4 * trained) * on_device
    }
    packed = {"4-bit weights": math.ceil(quantized * BITS / 8)} if quantized else {}
    if _has_reference(config):
        shards["reference"] = compute * weights.shard(shard) * on_device
    if model.teachers:
        shards["teacher"] = compute * sum(t.shard(shard) for t in model.teachers) * on_device
    # AdamW's two moments, and the gradients, are float32.
    optimizer = {"optimizer": 8 * trained * on_device}
    sharded_gradients = 4 * trained * on_device
    # Shards that were read go to the device as they are. Of whole weights FSDP2 moves a unit there,
    # and drops it for its shard.
    unit_bytes = model.stored * max(weights.root, weights.block, weights.tower_unit)
    reads_shards = shard > 1 and not quantized
    sharding = {"parameters": shards["parameters"] + (0 if reads_shards else unit_bytes)}
    shards = shards | packed
    process_parts = {
        "rank context": CONTEXT_BYTES + NCCL_BYTES * (ranks > 1),
        "allocator": RESIDUE_BYTES,
    }
    n_caches = _has_frozen_tower(model) + sum(teacher.tower > 0 for teacher in model.teachers)
    cache = {"vision cache": n_caches * TRAINER_BYTES}
    training = process_parts | shards | optimizer | cache
    resident = {} if actor.enable_offload else shards | optimizer
    # Before the images': it refuses a budget that is too large to be traced.
    train = _train_parts(config, model, keeps_gathered, sharded_gradients)
    return {
        "load": process_parts | packed | sharding,
        # An optimizer's state is made by a step, and then overwritten.
        "resume": process_parts | shards | optimizer | {"gradients": sharded_gradients},
        "generate": process_parts | resident | cache,
        "images": _with_slack(training, _image_parts(config, model, keeps_gathered)),
        "train": _with_slack(training, train),
        "sync": _with_slack(
            process_parts | shards | cache | resident, _sync_parts(config, model, strategy)
        ),
    }


def _itemsizes(config: Config) -> tuple[int, int]:
    """Return the bytes of an element in forward and backward, and in reductions of gradients."""
    precision = config.actor.fsdp_config.mixed_precision
    return DTYPES[precision.param_dtype].itemsize, DTYPES[precision.reduce_dtype].itemsize


def _has_reference(config: Config) -> bool:
    """Return whether a rank holds reference weights: under LoRA they are the policy's own."""
    return config.algorithm.kl_beta > 0 and not config.actor.model.is_lora


def _has_frozen_tower(model: Model) -> bool:
    """Return whether there is a vision tower that is not trained."""
    return model.weights.tower > 0 and not model.weights.trains_vision


def _train_parts(
    config: Config, model: Model, keeps_gathered: bool, sharded_gradients: int
) -> Parts:
    """Return the passing parts of forward, backward and optimizer step."""
    weights, expert = model.weights, expert_parallel_size(config)
    compute, reduce = _itemsizes(config)
    gathered = _gathered_elements(config, model, keeps_gathered)
    # Where weights stay gathered, gradients add up whole, in the dtype they are reduced in, until
    # the last micro-batch.
    whole_gradients = reduce * (weights.trained - _others(weights.trained_experts, expert))
    train = {
        # Of quantized weights, one is dense at a time.
        "gathered weights": compute * (gathered + max(weights.quantized, default=0)),
        "gradients": max(sharded_gradients, whole_gradients if keeps_gathered else 0),
        # A unit's own, and the buffer of its reduction.
        "gradients in flight": (compute + reduce)
        * (weights.unit_trained - _others(weights.block_trained_experts, expert)),
        "activations": model.step(
            config.runner.max_tokens_per_mbs,
            config.actor.context_parallel_size,
            config.actor.fsdp_config.gradient_checkpointing,
        ).peak,
    }
    if expert > 1:
        train["expert exchange"] = _exchanged(config, model, compute)
    return train


def _gathered_elements(config: Config, model: Model, keeps_gathered: bool) -> int:
    """Return the elements of policy, reference and teachers that a step has gathered."""
    weights, teachers, has_reference = model.weights, model.teachers, _has_reference(config)
    # Of experts a rank gathers those that are its own by expert parallelism.
    expert = expert_parallel_size(config)
    if keeps_gathered:
        n_weights = weights.total - _others(weights.experts, expert)
        tower = _has_frozen_tower(model) * weights.tower
        reference = has_reference * (n_weights - weights.tower)
        policy = n_weights - sum(weights.quantized) - tower
        return policy + reference + sum(teacher.total for teacher in teachers)
    block = weights.block - _others(weights.block_experts, expert)
    # A gathered unit and the buffer that it came in, for the block in use and the one fetched
    # ahead; the root stays n_weights.
    blocks = 4 * max(block, 0 if _has_frozen_tower(model) else weights.tower_unit)
    gathered = (1 + has_reference) * (weights.root + blocks)
    if teachers:
        # They run one after the other: each leaves its root whole, and the blocks of one are in use.
        gathered += sum(teacher.root for teacher in teachers)
        gathered += 4 * max(max(teacher.block, teacher.tower_unit) for teacher in teachers)
    return gathered


def _image_parts(config: Config, model: Model, keeps_gathered: bool) -> Parts:
    """Return the passing parts of a frozen tower on the step's images; {} without one."""
    if not _has_frozen_tower(model):
        return {}
    weights, (compute, _) = model.weights, _itemsizes(config)
    tower = weights.tower if keeps_gathered else 4 * weights.tower_unit
    return {
        "gathered weights": compute * (weights.root + tower),
        "activations": model.images(config.runner.max_tokens_per_mbs).peak,
    }


def _sync_parts(config: Config, model: Model, strategy: Strategy) -> Parts:
    """Return the passing parts of a weight sync."""
    largest_bytes = DTYPES[config.rollout.model.precision].itemsize * model.weights.largest
    return {
        # A weight is cast, then gathered (`actor.mesh.whole_tensors`): one whole, and its copy in
        # the order of its rows, or the one before.
        "gathered weights": 2 * largest_bytes,
        "buckets in flight": strategy.sender_peak_bytes(largest_bytes),
    }


def _others(experts: int, size: int) -> int:
    """Return the elements of experts that belong to the other ranks of expert parallelism."""
    return experts - math.ceil(experts / size)


def _exchanged(config: Config, model: Model, itemsize: int) -> int:
    """Return the bytes of a layer's exchange of tokens with other ranks' experts.

    They are the rows sent and received, for as many experts as a token has, and in backward the
    gradients of both. The received rows and what the experts make of them are in the trace as the
    rows of the busiest rank.
    """
    mixture = model.family.mixture(model.shape)
    assert mixture is not None
    tokens = -(-config.runner.max_tokens_per_mbs // config.actor.context_parallel_size)
    rows = tokens * mixture.top_k * (1 + EXPERT_IMBALANCE)
    return int(2 * rows * model.shape.get_text_config().hidden_size * itemsize)


def _with_slack(resident: Parts, passing: Parts) -> Parts:
    """Return the parts together, with the allocator's part for the passing ones."""
    return (
        resident
        | passing
        | {"allocator": RESIDUE_BYTES + int(FRAGMENTATION * sum(passing.values()))}
    )


def engine_parts(config: Config, model: Model, gpu_bytes: int, tp: int) -> Parts:
    """Return the parts of an engine on one GPU, but for its KV cache."""
    rollout, text = config.rollout, model.shape.get_text_config()
    itemsize, running = DTYPES[rollout.model.precision].itemsize, rollout.max_running_requests
    # Tokens that SGLang prefills at once, by the GPU's size (its arg_groups/memory_hook.py).
    prefill = 2048 if gpu_bytes < 20 * GIB else 4096 if gpu_bytes < 60 * GIB else 8192
    expert_width = getattr(text, "num_experts_per_tok", 0) * getattr(
        text, "moe_intermediate_size", 0
    )
    width = max(getattr(text, "intermediate_size", 0), expert_width)
    layer, tower = prefill * (4 * width + 8 * text.hidden_size) * itemsize, 0
    if model.family.vision_tower:
        vision = model.shape.vision_config
        tower = (
            4
            * prefill
            * (
                4 * getattr(vision, "intermediate_size", 4 * vision.hidden_size)
                + 10 * vision.hidden_size
            )
            * itemsize
        )
    sampler = 4 * running * text.vocab_size * 4  # logits, probabilities and two copies, float32
    is_sglang = rollout.rollout_backend == "sglang"
    return {
        # The worker, and SGLang's scheduler.
        "engine contexts": (2 if is_sglang else 1) * CONTEXT_BYTES + NCCL_BYTES * (tp > 1),
        "engine weights": math.ceil(itemsize * model.weights.total / tp),
        # SGLang reserves 2 MiB for each batch size up to the largest, and 8 MiB for each of about
        # 32 prefill graphs.
        "CUDA graphs": (2 * running + 8 * 32) * MIB if is_sglang else 0,
        "workspace": 512 * MIB + layer + tower + sampler,
    }
