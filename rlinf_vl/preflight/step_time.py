"""Estimate the seconds of each phase of a step, from the work of traced passes and from `Rates`.

| phase | seconds |
|---|---|
| generate | prompts and decoding of the engine with the longest queue (`decoding`) |
| images | the frozen tower's forward on a rank's images |
| logprobs | forwards without gradients: old logprobs, reference |
| train | micro-batches and optimizer steps |
| sync | weights from ranks to engines |
| wake | engines' and ranks' memory to and from host memory, where they take turns |
| checkpoint | a copy in host memory, and the disk's where nothing hides it; spread over its interval |

A micro-batch computes for (products + grouped products + attention + other operations' bytes), each
by its rate, or dispatches its operations, whichever takes longer. Weights are exchanged meanwhile,
tokens between. Ranks wait for the fullest one: `IMBALANCE`. What is left out: stragglers, garbage
collection, a shared network, recompilation, environments that take longer than their engine.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rlinf_vl.config.placement import Placement
from rlinf_vl.config.schema import Config
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.models.shapes import head_dim
from rlinf_vl.preflight.decoding import EngineShape, Lengths, generate_seconds, running_at_once
from rlinf_vl.preflight.model import Model, expert_parallel_size
from rlinf_vl.preflight.rates import Rates
from rlinf_vl.preflight.trace import Trace, Work
from rlinf_vl.preflight.traffic import (
    Exchange,
    Grid,
    context_exchanges,
    expert_exchanges,
    weight_exchanges,
)

#: Time of the fullest rank over that of the mean.
IMBALANCE = 1.1
#: Share of a micro-batch's budget that the planner fills.
FILL = 0.9
#: Bytes that AdamW reads and writes of its state for each trained value: gradient, weight, moments.
OPTIMIZER_BYTES = 32
#: Share of values in two bytes that `delta` finds changed, with their positions. Of float32 values
#: nearly all change.
DELTA_SHARE = 0.06
PHASES = ("generate", "images", "logprobs", "train", "sync", "wake", "checkpoint")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        phases: by name, as in `PHASES`.
        overhead: of planning, logging and recording.
        schedule: `runner.schedule`.
        tokens: of prompts and responses, that a step trains on.
        contention: that generating and training at once take longer, as they share cores.
    """

    phases: dict[str, float]
    overhead: float
    schedule: str
    tokens: float
    slots: int
    contention: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of a step; generating and training overlap in schedules ahead."""
        phases = self.phases
        train = phases["images"] + phases["logprobs"] + phases["train"]
        between = phases["sync"] + phases["wake"] + phases["checkpoint"] + self.overhead
        if self.schedule == "sync":
            return phases["generate"] + train + between
        return max(phases["generate"], train) + self.contention + between

    @property
    def tokens_per_slot(self) -> float:
        """Tokens a second of each GPU."""
        return self.tokens / self.total / self.slots


def usual_lengths(config: Config) -> Lengths:
    """Return the lengths that are assumed of a config's data, where nobody knows better.

    Prompts and their images are half of what they may be, responses too, and some of each step take
    the most.
    """
    data = config.data
    longest = config.algorithm.sampling_params.max_new_tokens or config.runner.seq_length // 2
    prompt = (data.max_prompt_length or config.runner.seq_length // 2) / 2
    images = prompt / 2 if data.image_keys else 0.0
    return Lengths(prompt, images, longest / 2, longest)


def grid_of(config: Config, placement: Placement) -> Grid:
    """Return the arrangement of the actor's ranks of a placement."""
    nodes = [placement.node_of(slot) for slot in placement.actor]
    per_node = min(nodes.count(node) for node in set(nodes))
    fsdp, ranks = config.actor.fsdp_config, len(nodes)
    shard = per_node if fsdp.strategy == "hsdp" else ranks
    context, expert = config.actor.context_parallel_size, expert_parallel_size(config)
    return Grid(ranks, shard, context, expert, per_node)


def estimate_step(
    config: Config,
    model: Model,
    placement: Placement,
    rates: Rates,
    lengths: Lengths,
    kv_tokens: int,
) -> StepTime:
    """Estimate the seconds of one step.

    Args:
        kv_tokens: tokens that an engine's KV cache holds.
    """
    groups, group_size = config.data.rollout_batch_size, config.algorithm.group_size
    grid = grid_of(config, placement)
    prompts = 1 if config.actor.share_prompts else group_size
    tokens = groups * (prompts * lengths.prompt + group_size * lengths.response)
    ranks = _Ranks(config, model, grid, rates, lengths, tokens)
    n, reference_passes = config.algorithm.n_minibatches, 0
    if config.algorithm.kl_beta > 0:
        reference_passes = n
    first = 0 if config.algorithm.recompute_logprobs == "true" else 1
    wake, is_shared = 0.0, placement.shared
    if is_shared:
        wake = rates.wake_s + _moved_while_generating(config, model, grid) / rates.host
    engines = placement.engines
    tp = min(map(len, engines))
    shape = engine_shape(config, model)
    n_engine_slots, n_ranks = _on_a_node(placement, placement.rollout), grid.per_node
    engines_alone, ranks_alone = rates.slowdown(n_engine_slots), rates.slowdown(n_ranks)
    running = running_at_once(config.rollout.max_running_requests, kv_tokens, lengths, group_size)
    generate = generate_seconds(
        shape,
        rates,
        gpus=tp,
        groups=groups / len(engines),
        group_size=group_size,
        slots=running,
        lengths=lengths,
    )
    phases = {
        "generate": engines_alone * generate,
        "images": ranks_alone * ranks.images(groups * lengths.images),
        "logprobs": ranks_alone * (n - first + reference_passes) * ranks.mini_batch(training=False),
        "train": ranks_alone * n * (ranks.mini_batch(training=True) + ranks.optimizer()),
        "sync": _sync(config, model, placement, grid, rates),
        "wake": wake,
        "checkpoint": _checkpoint(config, model, grid, rates),
    }
    training = phases["images"] + phases["logprobs"] + phases["train"]
    interval, contention, overhead = config.runner.trajectories.interval, 0.0, rates.step_s
    recording = rates.record_s / interval if interval > 0 else 0.0
    if config.cluster.backend == "local":
        # One process does one thing after the other, in every schedule.
        overhead += recording
        contention = min(phases["generate"], training) if config.runner.generates_ahead else 0.0
    elif config.runner.generates_ahead:
        if config.runner.schedule == "async" and phases["generate"] > training:
            # Weights arrive while rows are decoded; half of their tokens are there on average.
            group_tokens = lengths.prompt + group_size * lengths.response / 2
            phases["generate"] += _recomputed(
                config, shape, rates, groups / len(engines) * group_tokens
            )
        both = rates.slowdown(n_engine_slots + n_ranks)
        contention = contention_seconds(
            phases["generate"], both / engines_alone, training, both / ranks_alone
        )
        if rates.cores:
            # All processes of the run share the cores, also the one that records.
            n_busy = min(rates.cores, n_engine_slots + n_ranks)
            busy = n_engine_slots * generate + n_ranks * training / ranks_alone
            seconds = (rates.slowdown(n_busy) * busy + recording) / rates.cores
            contention = max(contention, seconds - max(phases["generate"], training))
    # Trained tokens, each trajectory with its prompt, as throughput is usually given.
    trained = groups * group_size * (lengths.prompt + lengths.response)
    slots = len({*placement.actor, *placement.rollout})
    return StepTime(phases, overhead, config.runner.schedule, trained, slots, contention)


def _on_a_node(placement: Placement, slots: Collection[int]) -> int:
    """Return the largest number of these slots that are on one machine."""
    nodes = [placement.node_of(slot) for slot in slots]
    return max(nodes.count(node) for node in set(nodes))


def _recomputed(config: Config, shape: EngineShape, rates: Rates, tokens: float) -> float:
    """Return the seconds in which an engine computes keys and values of tokens with new weights."""
    if config.rollout.kv_after_update == "keep":
        return 0.0
    # A calibrated engine's prompts are part of its groups' seconds: there the trainer's rate is.
    products = min(rates.prefill_products, rates.products)
    return 2 * shape.active * tokens / (products * config.rollout.tensor_parallel_size)


def contention_seconds(
    generate: float, generate_slowdown: float, training: float, train_slowdown: float
) -> float:
    """Return the seconds by which two phases at once take longer than the longer one alone.

    While both last each takes its slowdown times as long; then the longer one goes on alone.
    """
    (short, slowed), (_, longer_slowed) = sorted(
        [(generate, generate_slowdown), (training, train_slowdown)]
    )
    shared = short * slowed
    return shared - shared / longer_slowed


def engine_shape(config: Config, model: Model) -> EngineShape:
    """Return what decoding a config's model reads and computes."""
    text, weights = model.shape.get_text_config(), model.weights
    state, dtype = model.family.decode_state(model.shape), DTYPES[config.rollout.model.precision]
    embeddings = text.vocab_size * text.hidden_size  # read by row
    tied = getattr(model.shape, "tie_word_embeddings", False)
    dense = weights.total - weights.tower - weights.experts - (0 if tied else embeddings)
    tower = 0.0
    if model.family.vision_tower:
        images = model.images(IMAGE_TRACE)
        tower = images.work.products / IMAGE_TRACE
    per_pair = 4 * text.num_attention_heads * head_dim(text) * len(state.kv_layers)
    return EngineShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        itemsize=dtype.itemsize,
        dense=dense,
        experts=weights.experts,
        mixture=model.mixture,
        kv_token=state.token_bytes(dtype),
        tower=tower,
        per_pair=per_pair,
    )


#: Image tokens of the trace that a tower's work is taken from.
IMAGE_TRACE = 1024


class _Ranks:
    """The work of the actor's ranks in a step."""

    def __init__(
        self,
        config: Config,
        model: Model,
        grid: Grid,
        rates: Rates,
        lengths: Lengths,
        tokens: float,
    ) -> None:
        self.config, self.model, self.grid, self.rates = config, model, grid, rates
        self.lengths = lengths
        fsdp, minibatches = config.actor.fsdp_config, config.algorithm.n_minibatches
        self.gathers_once = grid.ranks == 1 or not fsdp.reshard_after_forward
        rows = grid.ranks // grid.context
        #: Time of the fullest rank over that of the mean.
        self.imbalance = IMBALANCE if rows > 1 else 1.0
        row_tokens = tokens / rows / minibatches
        budget, group_size = config.runner.max_tokens_per_mbs, config.algorithm.group_size
        if config.runner.enable_dynamic_batch_size:
            n_micro = row_tokens / (FILL * budget)
        else:
            trajectories = config.data.rollout_batch_size * group_size / rows / minibatches
            n_micro = trajectories / config.actor.micro_batch_size
        self.n_micro = max(1, math.ceil(n_micro))
        #: Tokens of a rank in a micro-batch.
        self.tokens = row_tokens / self.n_micro / grid.context
        self.trace = model.step(budget, grid.context, fsdp.gradient_checkpointing)
        self.share = self.tokens / -(-budget // grid.context)
        # Each query of a response sees its prompt and half of the response.
        r, p = lengths.response, lengths.prompt
        prompts = 1 if config.actor.share_prompts else group_size
        pairs = prompts * p * p / 2 + group_size * (p * r + r * r / 2)
        self.pairs = self.tokens * pairs / (prompts * p + group_size * r)

    def _compute(
        self, work: Work, operations: float, share: float, pairs: float, products: float
    ) -> float:
        """Return the seconds of a pass: a share of a trace's work, of all its operations.

        `products`: FLOPs a second of its matrix products.
        """
        rates = self.rates
        device = (
            share * work.products / products
            + share * work.grouped / rates.grouped
            + pairs * work.per_pair / rates.attention
            + share * work.moved / rates.memory
        )
        host = operations * rates.operation_s
        return max(device, host) if rates.overlaps_host else device + host

    def _seconds(self, exchanges: Iterable[Exchange]) -> float:
        """Return the seconds of exchanges, one after the other."""
        total = 0.0
        for exchange in exchanges:
            bandwidth = self.rates.network if exchange.crosses_nodes(self.grid) else self.rates.node
            # A ring moves all but a rank's own part, an all-reduce twice.
            share = (exchange.ranks - 1) / exchange.ranks * (1 + (exchange.kind == "all-reduce"))
            total += exchange.calls * self.rates.collective_s + share * exchange.nbytes / bandwidth
        return total

    def _weights(self, gathers: int, *, reduces: bool, parts: tuple[str, ...]) -> float:
        precision = self.config.actor.fsdp_config.mixed_precision
        return self._seconds(
            weight_exchanges(
                self.model.weights,
                self.grid,
                parts=parts,
                param_bytes=DTYPES[precision.param_dtype].itemsize,
                reduce_bytes=DTYPES[precision.reduce_dtype].itemsize,
                gathers=gathers,
                root_gathers=min(gathers, 1),
                reduces=reduces,
            )
        )

    def _tokens_exchanged(self, passes: int) -> float:
        """Return the seconds of exchanging tokens in a micro-batch."""
        model, text = self.model, self.model.shape.get_text_config()
        itemsize = DTYPES[self.config.actor.fsdp_config.mixed_precision.param_dtype].itemsize
        tokens, state = round(self.tokens), model.family.decode_state(model.shape)
        context = context_exchanges(
            self.grid,
            tokens=tokens,
            layers=len(state.kv_layers),
            heads=text.num_attention_heads,
            kv_heads=state.kv_heads,
            head_dim=head_dim(text),
            itemsize=itemsize,
            passes=passes,
        )
        experts = expert_exchanges(
            self.grid,
            model.family.mixture(model.shape),
            tokens=tokens,
            hidden=text.hidden_size,
            itemsize=itemsize,
            passes=passes,
        )
        return self._seconds([*context, *experts])

    def mini_batch(self, *, training: bool) -> float:
        """Return the seconds of a mini-batch's micro-batches, with gradients or without."""
        trace, weights = self.trace, self.model.weights
        parts = ("text", "root", *(("tower",) if weights.trains_vision else ()))
        work = trace.work if training else trace.forward
        recomputes = self.config.actor.fsdp_config.gradient_checkpointing != "none"
        # Two thirds of the operations are backward's, and those that are computed again.
        operations = trace.operations * (1 if training else 0.25 if recomputes else 0.33)
        compute = self._compute(work, operations, self.share, self.pairs, self.rates.products)
        passes = (3 if recomputes else 2) if training else 1
        tokens = self._tokens_exchanged(passes)
        if self.gathers_once:
            once = self._weights(1, reduces=training, parts=parts)
            return self.imbalance * self.n_micro * (compute + tokens) + once
        exchanged = self._weights(1 + training, reduces=training, parts=parts)
        # The first unit's gather and the last one's reduction hide behind nothing.
        blocks = sum(unit.part in parts for unit in weights.units)
        exposed = exchanged / max(1, blocks)
        micro_batch = max(self.imbalance * compute, exchanged) + exposed + tokens
        return self.n_micro * micro_batch

    def images(self, tokens: float) -> float:
        """Return the seconds of the frozen tower on a step's image tokens, all ranks sharing."""
        weights = self.model.weights
        if not weights.tower or weights.trains_vision or not tokens:
            return 0.0
        trace: Trace = self.model.images(IMAGE_TRACE)
        rank_tokens = tokens / (self.grid.ranks // self.grid.context)
        share = rank_tokens / IMAGE_TRACE
        # Each patch sees those of its image, of which about four make a token.
        pairs = rank_tokens * 4 * 4 * min(self.lengths.images, IMAGE_TRACE)
        passes = max(1.0, rank_tokens / self.config.runner.max_tokens_per_mbs)
        operations = passes * trace.operations
        compute = self._compute(trace.work, operations, share, pairs, self.rates.tower)
        gathered = passes * self._weights(1, reduces=False, parts=("tower",))
        return self.imbalance * max(compute, gathered)

    def optimizer(self) -> float:
        """Return the seconds of one optimizer step."""
        trained = self.model.weights.shard(self.grid.shard, trained=True)
        if self.config.actor.fsdp_config.cpu_offload:
            # The CPU's memory serves the ranks of a machine together; weights go to the device.
            return trained * (OPTIMIZER_BYTES + 8) / (self.rates.host / 2)
        return trained * OPTIMIZER_BYTES / self.rates.optimizer_memory


def _moved_while_generating(config: Config, model: Model, grid: Grid) -> int:
    """Return the bytes that a rank moves to host memory and back for engines to wake."""
    if not config.actor.enable_offload:
        return 0
    trained = model.weights.shard(grid.shard, trained=True)
    return 2 * (12 * trained + model.stored * (model.weights.shard(grid.shard) - trained))


def _sync(config: Config, model: Model, placement: Placement, grid: Grid, rates: Rates) -> float:
    """Return the seconds of a weight sync."""
    name, itemsize = config.rollout.weight_sync, DTYPES[config.rollout.model.precision].itemsize
    if name == "auto" and not (placement.beside_actors or config.cluster.backend == "local"):
        from rlinf_vl.weights.strategy import Site, choose_strategy  # imports Ray

        device = "cpu" if rates.cores else "cuda"
        site = Site(device, placement.shared, placement.beside_actors)
        name = choose_strategy(name, site).name
    nbytes = itemsize * model.weights.engine_elements
    crosses = grid.shard > grid.per_node
    gathered = nbytes * (grid.shard - 1) / grid.shard / (rates.network if crosses else rates.node)
    if name == "delta":
        changed = min(nbytes, itemsize * model.weights.trained)
        if itemsize < 4:
            changed *= DELTA_SHARE
        changes = rates.changes or rates.host / 2
        return rates.sync_s + nbytes / grid.shard / rates.host + changed / changes
    if placement.beside_actors and name in ("auto", "shared_memory"):
        return rates.sync_s + gathered + 3 * nbytes / rates.memory
    # From rank 0 to all engines, or through its host's memory.
    several = len(set(map(placement.node_of, placement.rollout))) > 1 or crosses
    sending_seconds = nbytes / (rates.network if several else rates.node)
    if name == "object_store":
        sending_seconds = 3 * nbytes / rates.host + nbytes / rates.network * several
    return rates.sync_s + gathered + sending_seconds


def _checkpoint(config: Config, model: Model, grid: Grid, rates: Rates) -> float:
    """Return the seconds that a checkpoint takes of each step, spread over its interval."""
    runner = config.runner
    if runner.save_interval < 1:
        return 0.0
    trained = model.weights.shard(grid.shard, trained=True)
    seconds = 12 * trained / rates.host
    if not runner.async_save:
        seconds += 12 * trained * grid.per_node / rates.disk
    return seconds / runner.save_interval
