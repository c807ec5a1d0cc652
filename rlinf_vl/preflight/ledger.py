"""Memory of one GPU over the phases of a step, part by part, in bytes.

| phase | what runs |
|---|---|
| load | a rank shards the model, unit by unit; collocated engines sleep (`rlinf_vl.controller.shared_gpu`) |
| resume | a rank reads model and optimizer, at a resume or after a rank's death; collocated engines sleep |
| generate | engines; ranks keep what `actor.enable_offload` does not move to host memory |
| images | the frozen tower on the step's images; collocated engines sleep |
| train | forward and backward of a micro-batch at `runner.max_tokens_per_mbs`, the optimizer step behind it |
| sync | ranks gather and send; collocated engines have their weights again, not yet their KV cache |

Weights, gradients and optimizer are counted by closed forms of FSDP2's sharding, activations by `rlinf_vl.preflight.trace`.
What no reading tells is a constant here, with its reason.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlinf_vl.config.placement import Placement, placement_of
from rlinf_vl.config.schema import Config
from rlinf_vl.engines.base import WAKE_RESERVE_BYTES, release_tags
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.models.nf4 import BITS
from rlinf_vl.preflight.model import Model
from rlinf_vl.preflight.trace import Trace
from rlinf_vl.transport.buckets import BUCKET_BYTES
from rlinf_vl.transport.staging import BUFFERS
from rlinf_vl.transport.strategies import resolve_weight_sync

GIB = 2**30
MIB = 2**20
#: A process's CUDA context with the kernels of PyTorch, cuBLAS and NCCL loaded: 0.4 to 0.6 GiB by others' accounts.
CONTEXT_BYTES = int(0.6 * GIB)
#: NCCL's buffers for one communicator of a rank.
NCCL_BYTES = int(0.3 * GIB)
#: Of what comes and goes in a training step, so much more stays with PyTorch's allocator in blocks of other sizes.
FRAGMENTATION = 0.1
#: What the allocator keeps after `empty_cache`: segments that living tensors share with freed ones.
RESIDUE_BYTES = int(0.5 * GIB)
#: Left free: for the driver, and what is forgotten here.
RESERVE_BYTES = GIB
#: Above this, SGLang's activations and graphs have too little room by its own rules.
MOST_SHARE = 0.85

#: What a phase is made of, as a table has it: a rank's, then an engine's.
PARTS = (
    *(
        "rank context",
        "parameters",
        "4-bit weights",
        "reference",
        "teacher",
        "optimizer",
        "gradients",
        "gathered weights",
    ),
    *("activations", "gradients in flight", "buckets in flight", "vision cache", "allocator"),
    *("engine contexts", "engine weights", "KV cache", "CUDA graphs", "workspace"),
)
Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Hardware:
    """`gpus` in each of `nodes` machines, with `gpu_bytes` as the driver reports them."""

    gpus: int
    gpu_bytes: int
    nodes: int = 1

    @classmethod
    def named(cls, gpus: int, gigabytes: float, nodes: int = 1) -> "Hardware":
        """GPUs by the size printed on them: a card of 80 GB has 78.8 to 79.6 GiB, one of 24 GB 23.6."""
        return cls(gpus, int(gigabytes * 0.985 * GIB), nodes)

    @property
    def usable(self) -> int:
        return self.gpu_bytes - RESERVE_BYTES

    def __str__(self) -> str:
        machines = f"{self.nodes} × " if self.nodes > 1 else ""
        return f"{machines}{self.gpus} GPU{'s' * (self.gpus > 1)} of {self.gpu_bytes / GIB:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU of the run: `role` collocated, actor or rollout, and bytes by phase and part."""

    role: str
    phases: dict[str, Parts]

    @property
    def peak(self) -> tuple[int, str]:
        """(bytes, phase) of the fullest phase."""
        return max((sum(parts.values()), phase) for phase, parts in self.phases.items())


@dataclass(frozen=True)
class Ledger:
    """What a config takes on some hardware."""

    config: Config
    hardware: Hardware
    gpus: tuple[Gpu, ...]
    share: float  # `rollout.gpu_memory_utilization`, `auto` resolved
    kv_tokens: int  # what an engine's KV cache then holds
    trace: Trace
    said: str  # where the model's shape is from
    problems: tuple[str, ...] = ()  # why it can't run; `rlinf_vl.preflight.advice` has the way out


def ledger(config: Config, hardware: Hardware, model: Model | None = None, placed: Placement | None = None) -> Ledger:
    """Sum up what `config` takes on GPUs of this kind. `placed`: who sits where; None: as on a cluster of `hardware` alone.

    Raises:
        ConfigError: the placement does not fit the cluster, or the model's shape is unknown.
    """
    placed = placed or placement_of(config, (hardware.gpus,) * hardware.nodes)
    ranks, shared, tp = (
        len(placed.actor),
        placed.shared,
        min(map(len, placed.engines)),
    )  # the fullest GPUs are the smallest engine's
    model = model or Model(config)
    strategy = resolve_weight_sync(config.rollout.weight_sync, "cuda", shared, placed.beside_actors)
    hybrid = config.actor.fsdp_config.strategy == "hsdp"
    on_node = Counter(map(placed.node_of, placed.actor))
    rank = _rank(config, model, ranks, min(on_node.values()) if hybrid else ranks, strategy)
    fixed = _engine(config, model, hardware, tp)
    weights = fixed.pop("engine weights")
    state = model.family.decode_state(model.shape)
    per_token = math.ceil(state.token_bytes(DTYPES[config.rollout.model.precision]) / tp)
    per_row = math.ceil(state.row_bytes() / tp)
    base = hardware.gpu_bytes - fixed["engine contexts"]  # what SGLang measures its share of
    beside = sum(fixed.values()) + (sum(rank["generate"].values()) if shared else 0)
    wakes = WAKE_RESERVE_BYTES - RESERVE_BYTES if shared else 0
    fits = math.floor(100 * (hardware.usable - wakes - beside) / base) / 100
    written = config.rollout.gpu_memory_utilization
    share = max(0.0, min(MOST_SHARE, fits)) if isinstance(written, str) else written
    kv = max(0, int(share * base) - weights)
    least = (weights + config.algorithm.group_size * (config.runner.seq_length * per_token + per_row)) / base
    loaded = {"engine weights": weights} | fixed
    awake = {"KV cache": kv} | loaded
    gpus = []
    if shared:
        asleep = fixed if "weights" in release_tags(weights, hardware.gpu_bytes) else loaded
        engines = {"generate": awake, "sync": loaded}
        gpus.append(Gpu("collocated", {phase: parts | engines.get(phase, asleep) for phase, parts in rank.items()}))
    if set(placed.actor) - set(placed.rollout):
        gpus.append(Gpu("actor", rank))
    if not placed.beside_actors:
        gpus.append(Gpu("rollout", {"generate": awake, "sync": awake | {"buckets in flight": 2 * BUCKET_BYTES}}))
    trace = model.step(config.runner.max_tokens_per_mbs)
    of_tokens = max(0, kv - config.rollout.max_running_requests * per_row)
    made = Ledger(config, hardware, tuple(gpus), share, of_tokens // per_token, trace, model.said)
    return replace(made, problems=tuple(_problems(made, least)))


def _rank(config: Config, model: Model, ranks: int, shard: int, strategy: str) -> dict[str, Parts]:
    """Of an actor rank, by phase; every `shard` ranks have the weights between them."""
    fsdp, weights, actor = config.actor.fsdp_config, model.weights, config.actor
    compute, reduce = (_bytes(d) for d in (fsdp.mixed_precision.param_dtype, fsdp.mixed_precision.reduce_dtype))
    on_device = 0 if fsdp.cpu_offload else 1
    keeps = not fsdp.reshard_after_forward or ranks == 1
    frozen = weights.tower > 0 and not weights.trains_vision
    reference = config.algorithm.kl_beta > 0 and not actor.model.is_lora
    trained, quantized = weights.shard(shard, trained=True), sum(weights.quantized)
    shards = {"parameters": (model.stored * (weights.shard(shard) - trained) + 4 * trained) * on_device}
    packed = {"4-bit weights": math.ceil(quantized * BITS / 8)} if quantized else {}
    if reference:
        shards["reference"] = compute * weights.shard(shard) * on_device
    if teacher := model.teacher:
        shards["teacher"] = compute * teacher.shard(shard) * on_device
    optimizer = {"optimizer": 8 * trained * on_device}
    sharded_gradients = 4 * trained * on_device
    # A gathered unit and the buffer that it came in, for the block in use and the one fetched ahead; the root stays whole.
    blocks = 4 * max(weights.block, 0 if frozen else weights.tower_unit)
    gathered = weights.total - quantized - frozen * weights.tower if keeps else weights.root + blocks
    if reference:
        gathered += weights.total - weights.tower if keeps else weights.root + blocks
    if teacher:
        gathered += teacher.total if keeps else teacher.root + 4 * max(teacher.block, teacher.tower_unit)
    train = {
        # Of quantized weights, one is dense at a time.
        "gathered weights": compute * (gathered + max(weights.quantized, default=0)),
        # Kept gathered, gradients add up whole, in the dtype they are reduced in, until the last micro-batch.
        "gradients": max(sharded_gradients, reduce * weights.trained) if keeps else sharded_gradients,
        # A unit's own, and the buffer of its reduction.
        "gradients in flight": (compute + reduce) * weights.unit_trained,
        "activations": model.step(config.runner.max_tokens_per_mbs).peak,
    }
    images = {}
    if frozen:
        tower = weights.tower if keeps else 4 * weights.tower_unit
        images["gathered weights"] = compute * (weights.root + tower)
        images["activations"] = model.images(config.runner.max_tokens_per_mbs).peak
    sent = _bytes(config.rollout.model.precision)
    # A bucket that is sent, and one made meanwhile. In shared memory two are read, each as large as the largest weight.
    flight = 2 * BUCKET_BYTES
    if strategy == "shared_memory":
        flight = BUCKET_BYTES + BUFFERS * max(BUCKET_BYTES, sent * weights.largest)
    sync = {"gathered weights": (4 + sent) * weights.largest, "buckets in flight": flight}
    # FSDP2 moves a unit to the device whole, and drops it for its shard.
    unit_on_its_way = model.stored * max(weights.root, weights.block, weights.tower_unit)
    sharding = {"parameters": shards["parameters"] + unit_on_its_way}
    shards = shards | packed
    process = {"rank context": CONTEXT_BYTES + NCCL_BYTES * (ranks > 1), "allocator": RESIDUE_BYTES}
    caches = frozen + (teacher is not None and teacher.tower > 0)
    cache = {"vision cache": caches * int(actor.vision_cache_gb * GIB)}
    training = process | shards | optimizer | cache
    resident = {} if actor.enable_offload else shards | optimizer
    return {
        "load": process | packed | sharding,
        # An optimizer's state is made by a step, and then overwritten.
        "resume": process | shards | optimizer | {"gradients": sharded_gradients},
        "generate": process | resident | cache,
        "images": _with_slack(training, images),
        "train": _with_slack(training, train),
        "sync": _with_slack(process | shards | cache | resident, sync),
    }


def _with_slack(resident: Parts, passing: Parts) -> Parts:
    return resident | passing | {"allocator": RESIDUE_BYTES + int(FRAGMENTATION * sum(passing.values()))}


def _engine(config: Config, model: Model, hardware: Hardware, tp: int) -> Parts:
    """Of an engine on one GPU, but for its KV cache."""
    rollout, text = config.rollout, model.shape.get_text_config()
    size, running = _bytes(rollout.model.precision), rollout.max_running_requests
    # SGLang prefills so many tokens at once, by the GPU's size (its arg_groups/memory_hook.py).
    prefill = 2048 if hardware.gpu_bytes < 20 * GIB else 4096 if hardware.gpu_bytes < 60 * GIB else 8192
    of_experts = getattr(text, "num_experts_per_tok", 0) * getattr(text, "moe_intermediate_size", 0)
    width = max(getattr(text, "intermediate_size", 0), of_experts)
    layer, tower = prefill * (4 * width + 8 * text.hidden_size) * size, 0
    if model.family.vision_tower:
        vision = model.shape.vision_config
        tower = (
            4
            * prefill
            * (4 * getattr(vision, "intermediate_size", 4 * vision.hidden_size) + 10 * vision.hidden_size)
            * size
        )
    sampler = 4 * running * text.vocab_size * 4  # logits, probabilities and two copies, float32
    sglang = rollout.rollout_backend == "sglang"
    return {
        # The worker, and SGLang's scheduler.
        "engine contexts": (2 if sglang else 1) * CONTEXT_BYTES + NCCL_BYTES * (tp > 1),
        "engine weights": math.ceil(size * model.weights.total / tp),
        # SGLang reserves 2 MiB for each batch size up to the largest, and 8 MiB for each of about 32 prefill graphs.
        "CUDA graphs": (2 * running + 8 * 32) * MIB if sglang else 0,
        "workspace": 512 * MIB + layer + tower + sampler,
    }


def _bytes(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def _problems(made: Ledger, least: float) -> Iterator[str]:
    """Say which phases are too full. `least`: the smallest share of the GPU that an engine can work with."""
    config, usable = made.config, made.hardware.usable
    full = False
    for gpu in made.gpus:
        totals = {phase: sum(parts.values()) for phase, parts in gpu.phases.items()}
        for phases in (("generate",), ("images", "train"), ("load", "resume", "sync")):
            phase = max(phases, key=lambda name: totals.get(name, 0))
            if totals.get(phase, 0) > usable:
                full = True
                yield f"{phase} needs {totals[phase] / GIB:.1f} of {usable / GIB:.1f} GiB on a GPU ({gpu.role})"
    if made.share < least and not full:
        yield (
            f"rollout.gpu_memory_utilization: {made.share:.2f} holds the engine's weights and less than one group of "
            f"{config.algorithm.group_size} responses, which takes {least:.2f}"
        )


def largest_budget(made: Ledger, model: Model) -> int:
    """The largest `runner.max_tokens_per_mbs`, in steps of 512 and up to four times the config's, with which training fits;
    0 where the longest trajectory has no room.

    A pass's memory is linear in its tokens but for the head's chunks, so two traces give a first guess, and others check it.
    """
    now, least = made.config.runner.max_tokens_per_mbs, made.config.runner.seq_length
    other, found = max(least, now // 2), []
    for gpu in made.gpus:
        for phase, trace in (("images", model.images), ("train", model.step)):
            parts = gpu.phases.get(phase, {})
            if not parts.get("activations"):
                continue
            beside = sum(parts.values()) - int((1 + FRAGMENTATION) * parts["activations"])
            room = int((made.hardware.usable - beside) / (1 + FRAGMENTATION))
            slope = (trace(now).peak - trace(other).peak) / (now - other) if now > other else 0
            tokens = min(4 * now, int(now + (room - trace(now).peak) / max(slope, 1.0)) // 512 * 512)
            while tokens >= least and trace(tokens).peak > room:
                tokens = int(tokens * 0.95) // 512 * 512
            found.append(tokens)
    return min(found) if found and min(found) >= least else 0
