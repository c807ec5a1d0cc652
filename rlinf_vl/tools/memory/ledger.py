"""Count the memory of one GPU over the phases of a step, part by part, in bytes.

| phase | contents |
|---|---|
| load | a rank shards the model, unit by unit; collocated engines sleep (`controller.shared_gpu`) |
| resume | a rank reads model and optimizer, also after a rank's death; collocated engines sleep |
| generate | engines; ranks keep what `actor.enable_offload` does not move to host memory |
| images | the frozen tower on the step's images; collocated engines sleep |
| train | forward and backward at `runner.max_tokens_per_mbs`, then the optimizer step |
| sync | ranks gather and send; collocated engines have their weights, not yet their KV cache |

The parts are counted by `rlinf_vl.tools.memory.gpu_parts`.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from rlinf_vl.config.placement import Placement, placement_of
from rlinf_vl.config.schema import Config
from rlinf_vl.engines.base import WAKE_RESERVE_BYTES, release_tags
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.models.recompute import MODES
from rlinf_vl.tools.memory.gpu_parts import (
    FRAGMENTATION,
    GIB,
    Parts,
    engine_parts,
    rank_parts,
)
from rlinf_vl.tools.memory.model import Model
from rlinf_vl.tools.memory.trace import Trace
from rlinf_vl.weights.strategy import Site, choose_strategy

#: Memory left free: for the driver, and for what this ledger omits.
RESERVE_BYTES = GIB
#: Memory beside `RESERVE_BYTES` that an `auto` share of collocated engines leaves free. No GPU has
#: measured yet what a wake, CUDA graphs and NCCL's communicators of eight ranks take beyond what is
#: counted, and a share that is too high ends a run where one that is too low costs some cache.
MARGIN_BYTES = 3 * GIB
#: Above this, SGLang's activations and graphs have too little room by its own rules.
MOST_SHARE = 0.85
#: Keys of `actor.fsdp_config` that the ledger settles where they are `auto`.
AUTOMATIC = ("gradient_checkpointing", "reshard_after_forward")
#: The share of usable memory that `auto` leaves free in training, as activations are an estimate.
AUTOMATIC_FREE = 0.05


@dataclass(frozen=True, slots=True)
class Hardware:
    """Machines with GPUs: `gpus` in each of `nodes`, with `gpu_bytes` by the driver's account."""

    gpus: int
    gpu_bytes: int
    nodes: int = 1

    @classmethod
    def named(cls, gpus: int, gigabytes: float, nodes: int = 1) -> "Hardware":
        """Return hardware by the size printed on cards.

        A card of 80 GB has 78.8 to 79.6 GiB, one of 24 GB 23.6.
        """
        return cls(gpus, int(gigabytes * 0.985 * GIB), nodes)

    @property
    def usable(self) -> int:
        return self.gpu_bytes - RESERVE_BYTES

    def __str__(self) -> str:
        machines = f"{self.nodes} × " if self.nodes > 1 else ""
        return f"{machines}{self.gpus} GPU{'s' * (self.gpus > 1)} of {self.gpu_bytes / GIB:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU of the run.

    Attributes:
        role: collocated, actor or rollout.
        phases: bytes by phase and part.
    """

    role: str
    phases: dict[str, Parts]

    @property
    def peak(self) -> tuple[int, str]:
        """The fullest phase: (bytes, phase)."""
        return max((sum(parts.values()), phase) for phase, parts in self.phases.items())

    def peak_text(self, usable: int) -> str:
        """Describe the fullest phase, and a margin that is smaller than `MARGIN_BYTES`."""
        peak, phase = self.peak
        text = f"at most {peak / GIB:.1f} of {usable / GIB:.1f} GiB, in {phase}"
        if not 0 <= usable - peak < MARGIN_BYTES:
            return text
        return (
            f"{text}, with {(usable - peak) / GIB:.1f} free where {MARGIN_BYTES / GIB:g} are safe"
        )


@dataclass(frozen=True)
class Ledger:
    """The memory that a config takes on some hardware.

    Attributes:
        share: `rollout.gpu_memory_utilization`, with `auto` resolved.
        kv_tokens: tokens that an engine's KV cache then holds.
        shape_source: where the model's shape is from.
        settled: the keys of `actor.fsdp_config` that were `auto`.
        problems: reasons why it can't run; `rlinf_vl.tools.memory.advice` has remedies.
    """

    config: Config
    hardware: Hardware
    gpus: tuple[Gpu, ...]
    share: float
    kv_tokens: int
    trace: Trace
    shape_source: str
    settled: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def ledger(
    config: Config,
    hardware: Hardware,
    model: Model | None = None,
    placement: Placement | None = None,
) -> Ledger:
    """Sum up the memory that `config` takes on GPUs of this kind.

    Where a key of `actor.fsdp_config` is `auto`, it has the fastest value with which training fits
    and leaves `AUTOMATIC_FREE` of the memory, or else the one that takes the least memory. The
    ledger's config has that value.

    Args:
        placement: of ranks and engines; None: as on a cluster of `hardware` alone.

    Raises:
        ConfigError: the placement does not fit the cluster, or the model's shape is unknown.
    """
    placement = placement or placement_of(config, (hardware.gpus,) * hardware.nodes)
    model = model or Model(config)
    *faster, last = settled_configs(config)
    smallest = _ledger(last, hardware, model, placement)
    # Where the smallest has no room to spare, the other ones need no trace.
    for settled in faster if _training_leaves_room(smallest) else ():
        if _training_leaves_room(candidate := _ledger(settled, hardware, model, placement)):
            return replace(candidate, settled=automatic_keys(config))
    return replace(smallest, settled=automatic_keys(config))


def peak_by_phase(config: Config, n_gpus: int, gpu_bytes: int) -> tuple[dict[str, int], str]:
    """Return the bytes that each phase takes on the fullest GPU, and a line that says whether they
    fit."""
    memory_ledger = ledger(config, Hardware(n_gpus, gpu_bytes), Model(config))
    peaks: dict[str, int] = {}
    for gpu in memory_ledger.gpus:
        for phase, parts in gpu.phases.items():
            peaks[phase] = max(peaks.get(phase, 0), sum(parts.values()))
    problems = "; ".join(memory_ledger.problems)
    return peaks, f"does not fit: {problems}" if problems else f"fits {memory_ledger.hardware}"


def automatic_keys(config: Config) -> tuple[str, ...]:
    """Return the keys of `actor.fsdp_config` whose value is `auto`."""
    fsdp = config.actor.fsdp_config
    return tuple(key for key in AUTOMATIC if getattr(fsdp, key) == "auto")


def settled_configs(config: Config) -> list[Config]:
    """Return the configs that `auto` in `actor.fsdp_config` may stand for, the fastest first.

    A recomputation costs up to a quarter of training. Gathering weights again costs less, as it
    runs beside products: it is given up last.
    """
    fsdp = config.actor.fsdp_config
    modes = MODES if fsdp.gradient_checkpointing == "auto" else (fsdp.gradient_checkpointing,)
    reshards = (
        (False, True) if fsdp.reshard_after_forward == "auto" else (fsdp.reshard_after_forward,)
    )
    configs: list[Config] = []
    for mode in modes:
        for reshard in reshards:
            settled = copy.deepcopy(config)
            settled.actor.fsdp_config.gradient_checkpointing = mode
            settled.actor.fsdp_config.reshard_after_forward = reshard
            configs.append(settled)
    return configs


def _training_leaves_room(memory_ledger: Ledger) -> bool:
    """Return whether forward, backward and optimizer step leave `AUTOMATIC_FREE` of every GPU."""
    trainings = (gpu.phases.get("train", {}) for gpu in memory_ledger.gpus)
    room = (1 - AUTOMATIC_FREE) * memory_ledger.hardware.usable
    return all(sum(parts.values()) <= room for parts in trainings)


def _ledger(config: Config, hardware: Hardware, model: Model, placement: Placement) -> Ledger:
    """Sum up the memory of a config without `auto` in `actor.fsdp_config`."""
    ranks, is_shared = len(placement.actor), placement.shared
    tp = min(map(len, placement.engines))  # the smallest engine's GPUs are the fullest
    site = Site("cuda", is_shared, placement.beside_actors)
    strategy = choose_strategy(config.rollout.weight_sync, site)
    # With hsdp the ranks of each node share the weights: the smallest node's shards are the largest.
    is_hybrid = config.actor.fsdp_config.strategy == "hsdp"
    ranks_by_node = Counter(map(placement.node_of, placement.actor))
    rank_phases = rank_parts(
        config, model, ranks, min(ranks_by_node.values()) if is_hybrid else ranks, strategy
    )
    engine = engine_parts(config, model, hardware.gpu_bytes, tp)
    engine_weights = engine.pop("engine weights")
    state = model.family.decode_state(model.shape)
    # Ranks of an engine that are more than the key heads have copies of them, unless groups of them
    # attend to requests of their own.
    groups = config.rollout.sglang.attn_dp_size
    kv_ranks = groups * min(tp // groups, state.kv_heads)
    engine_dtype = DTYPES[config.rollout.model.precision]
    per_token = math.ceil(state.token_bytes(engine_dtype) / kv_ranks)
    per_row = math.ceil(state.row_bytes() / tp)
    share_base = hardware.gpu_bytes - engine["engine contexts"]  # SGLang's share is of this
    # Engines apart from ranks keep their KV cache while weights arrive.
    largest_bytes = engine_dtype.itemsize * model.weights.largest
    received_bytes = 0 if placement.beside_actors else strategy.receiver_peak_bytes(largest_bytes)
    other_bytes = (
        sum(engine.values())
        + received_bytes
        + (sum(rank_phases["generate"].values()) if is_shared else 0)
    )
    # An engine must hold one group of the longest responses.
    smallest_share = (
        engine_weights
        + config.algorithm.group_size * (config.runner.seq_length * per_token + per_row)
    ) / share_base
    share = config.rollout.gpu_memory_utilization
    if isinstance(share, str):
        free_bytes = hardware.usable - other_bytes
        share = _automatic_share(free_bytes, share_base, smallest_share, is_shared)
    kv_bytes = max(0, int(share * share_base) - engine_weights)
    with_weights = {"engine weights": engine_weights} | engine
    with_cache = {"KV cache": kv_bytes} | with_weights
    # Engines with small weights keep them while they sleep (`release_tags`).
    loses_weights = "weights" in release_tags(engine_weights, hardware.gpu_bytes)
    gpus = []
    if is_shared:
        asleep = engine if loses_weights else with_weights
        engines = {"generate": with_cache, "sync": with_weights}
        phases = {name: parts | engines.get(name, asleep) for name, parts in rank_phases.items()}
        gpus.append(Gpu("collocated", phases))
    if set(placement.actor) - set(placement.rollout):
        gpus.append(Gpu("actor", rank_phases))
    if not placement.beside_actors:
        arriving = with_cache | {"buckets in flight": received_bytes}
        gpus.append(Gpu("rollout", {"generate": with_cache, "sync": arriving}))
    trace = model.step(
        config.runner.max_tokens_per_mbs,
        config.actor.context_parallel_size,
        config.actor.fsdp_config.gradient_checkpointing,
    )
    # States of fixed size, one for each running request, take their bytes first.
    kv_token_bytes = max(0, kv_bytes - config.rollout.max_running_requests * per_row)
    memory_ledger = Ledger(
        config, hardware, tuple(gpus), share, kv_token_bytes // per_token, trace, model.shape_source
    )
    return replace(memory_ledger, problems=tuple(_problems(memory_ledger, smallest_share)))


def _automatic_share(
    free_bytes: int, share_base: int, smallest_share: float, is_shared: bool
) -> float:
    """Return the share that `auto` stands for: `free_bytes` are left to weights and KV cache."""
    wake_bytes = WAKE_RESERVE_BYTES - RESERVE_BYTES if is_shared else 0
    fitting_share = _rounded_share(free_bytes - wake_bytes, share_base)
    if is_shared:
        # A full GPU gives up the margin before it gives up the run.
        roomy_share = _rounded_share(free_bytes - MARGIN_BYTES, share_base)
        needed_share = math.ceil(100 * smallest_share) / 100
        fitting_share = min(fitting_share, max(roomy_share, needed_share))
    return max(0.0, min(MOST_SHARE, fitting_share))


def _rounded_share(available_bytes: int, share_base: int) -> float:
    """Return the share of the engine's memory in whole hundredths, as a user would write it."""
    return math.floor(100 * available_bytes / share_base) / 100


def _problems(memory_ledger: Ledger, smallest_share: float) -> Iterator[str]:
    """Describe the phases that are too full.

    `smallest_share`: of the GPU that an engine can work with.
    """
    config, usable = memory_ledger.config, memory_ledger.hardware.usable
    is_full = False
    for gpu in memory_ledger.gpus:
        totals = {phase: sum(parts.values()) for phase, parts in gpu.phases.items()}
        # Of phases that the same changes relieve, the fullest stands for all.
        for phases in (("generate",), ("images", "train"), ("load", "resume", "sync")):
            phase = max(phases, key=lambda name: totals.get(name, 0))
            if totals.get(phase, 0) > usable:
                is_full = True
                yield f"{phase} needs {totals[phase] / GIB:.1f} of {usable / GIB:.1f} GiB on a GPU ({gpu.role})"
    if memory_ledger.share < smallest_share and not is_full:
        yield (
            f"rollout.gpu_memory_utilization: {memory_ledger.share:.2f} holds the engine's weights "
            f"and less than one group of {config.algorithm.group_size} responses, which takes "
            f"{smallest_share:.2f}"
        )


def largest_budget(memory_ledger: Ledger, model: Model) -> int:
    """Return the largest `runner.max_tokens_per_mbs` with which training fits.

    It is a multiple of 512, and at most four times the config's; 0 where the longest trajectory has
    no room. A pass's memory is linear in its tokens but for the head's chunks, so two traces give a
    first guess, and others check it.
    """
    runner = memory_ledger.config.runner
    budget, smallest_budget = runner.max_tokens_per_mbs, runner.seq_length
    second_budget = max(smallest_budget, budget // 2)
    budgets: list[int] = []
    actor = memory_ledger.config.actor
    step = partial(
        model.step,
        context=actor.context_parallel_size,
        mode=actor.fsdp_config.gradient_checkpointing,
    )
    for gpu in memory_ledger.gpus:
        for phase, trace in (("images", model.images), ("train", step)):
            parts = gpu.phases.get(phase, {})
            if not parts.get("activations"):
                continue
            other_bytes = sum(parts.values()) - int((1 + FRAGMENTATION) * parts["activations"])
            available = int((memory_ledger.hardware.usable - other_bytes) / (1 + FRAGMENTATION))
            slope = (
                (trace(budget).peak - trace(second_budget).peak) / (budget - second_budget)
                if budget > second_budget
                else 0
            )
            tokens = min(
                4 * budget,
                int(budget + (available - trace(budget).peak) / max(slope, 1.0)) // 512 * 512,
            )
            while tokens >= smallest_budget and trace(tokens).peak > available:
                tokens = int(tokens * 0.95) // 512 * 512
            budgets.append(tokens)
    return min(budgets) if budgets and min(budgets) >= smallest_budget else 0
