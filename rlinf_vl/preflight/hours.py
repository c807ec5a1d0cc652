"""Estimate the hours of a run as a range; `preflight --time`.

Each phase takes what it computes, reads or sends, over what its GPUs can, times a share that is
reached. The shares are those between which published systems lie (`Shares`), so the two ends differ
by a factor of 3 to 5. Nothing of it was measured with this package on a GPU. What narrows it is
three steps of the run itself: `runner.max_steps=3`, and `time/step` in its metrics. Layouts are
ranked by the fast end.

- generate: the prompts' products; then, token by token, the weights and the running responses'
  keys and values are read, or the products are computed, whichever takes longer.
- train: 2 FLOPs a weight and token forward, twice that backward, and forward again where layers are
  recomputed; images once with a frozen tower. Weights and gradients go between ranks meanwhile.
- between: weights to engines, memory to the host and back, AdamW's state.
"""

import argparse
import math
import sys
from dataclasses import dataclass, replace

from rlinf_vl.config.placement import Placement, placement_of
from rlinf_vl.config.schema import Config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.sources import open_source
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.models.shapes import head_dim
from rlinf_vl.preflight.gpu_kinds import GPU_KINDS, GpuKind, kind_of_size
from rlinf_vl.preflight.ledger import Hardware, ledger
from rlinf_vl.preflight.model import Model

#: Beginnings of data sets that an estimate neither fetches nor draws.
UNCOUNTED_ROWS = ("hf://", "verifiers://", *TOYS)
PHASES = ("generate", "train", "between")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a data sheet's figures that are reached: of products, memory and links."""

    products: float
    memory: float
    links: float


#: Fast: what FSDP2 reaches in pretraining (torchtitan's tables: 0.35 to 0.45 of dense products).
#: Slow: EasyR1's published updates of 3B to 32B, 0.06 to 0.26 (assets/baselines.md at v0.3.2).
FAST, SLOW = Shares(0.4, 0.7, 0.7), Shares(0.08, 0.3, 0.3)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt, of its images among them, and of a response: means, and the longest."""

    prompt: float
    images: float
    response: float
    longest: float

    def __str__(self) -> str:
        return (
            f"prompts of {self.prompt:.0f} tokens, {self.images:.0f} of them images'; responses "
            f"of {self.response:.0f}, the longest {self.longest:.0f}"
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step's phases at one end of the range, and the tokens it trains on by GPU."""

    phases: dict[str, float]
    overlaps: bool
    tokens_per_gpu: float

    @property
    def total(self) -> float:
        """The seconds of a step; generating and training overlap in schedules ahead."""
        generate, train, between = (self.phases[name] for name in PHASES)
        return (max(generate, train) if self.overlaps else generate + train) + between


def usual_lengths(config: Config) -> Lengths:
    """Return the lengths that are assumed of a config's data, where nobody knows better: half of
    what prompts, images and responses may be."""
    data = config.data
    longest = config.algorithm.sampling_params.max_new_tokens or config.runner.seq_length // 2
    prompt = (data.max_prompt_length or config.runner.seq_length // 2) / 2
    return Lengths(prompt, prompt / 2 if data.image_keys else 0.0, longest / 2, longest)


def estimate_step(
    config: Config, model: Model, placement: Placement, kind: GpuKind, lengths: Lengths,
    kv_tokens: int, shares: Shares = FAST,
) -> StepTime:  # fmt: skip
    """Estimate the seconds of one step; `kv_tokens`: of an engine's KV cache."""
    n_groups, size = config.data.rollout_batch_size, config.algorithm.group_size
    text, weights, fsdp = model.shape.get_text_config(), model.weights, config.actor.fsdp_config
    mixture = model.mixture
    active = weights.total - weights.tower - weights.experts
    if mixture is not None:
        active += weights.experts * mixture.top_k / mixture.experts
    per_pair = 4 * text.num_attention_heads * head_dim(text) * text.num_hidden_layers
    products, memory = shares.products * kind.products, shares.memory * kind.memory
    gpus_of_node = [placement.node_of(slot) for slot in placement.actor]
    n_ranks, per_node = len(gpus_of_node), gpus_of_node.count(gpus_of_node[0])

    def link(ranks: int) -> float:
        return shares.links * (kind.network if ranks > per_node else kind.node)

    # Generating: an engine decodes `running` responses at once, and one for longest tokens.
    engine_gpus, bytes_ = (
        config.rollout.tensor_parallel_size,
        DTYPES[config.rollout.model.precision],
    )
    responses = n_groups * size / max(1, len(placement.rollout) // engine_gpus)
    tokens_of_one = lengths.prompt / size + (lengths.response + lengths.longest) / 2
    running = max(
        1.0, min(responses, config.rollout.max_running_requests, kv_tokens // tokens_of_one)
    )
    steps = lengths.longest + max(0.0, responses / running - 1) * lengths.response
    context = lengths.prompt + lengths.response / 2
    touched = 1.0 if mixture is None else 1 - (1 - mixture.top_k / mixture.experts) ** running
    dense = weights.total - weights.tower - weights.experts
    read = bytes_.itemsize * (dense + touched * weights.experts)
    read += running * context * model.family.decode_state(model.shape).token_bytes(bytes_)
    decode = max(read / memory, 2 * active * running / products) / engine_gpus
    tower = 2 * weights.tower * 4 * lengths.images  # about four patches make a token
    prompt = 2 * active * lengths.prompt + per_pair * lengths.prompt**2 / 2 + tower
    generate = steps * decode + responses / size * prompt / (products * engine_gpus)

    # Training: passes over all tokens, prompts once where a group shares them.
    prompts = 1 if config.actor.share_prompts else size
    tokens = n_groups * (prompts * lengths.prompt + size * lengths.response)
    recomputes = fsdp.gradient_checkpointing != "none"
    first = 0 if config.algorithm.recompute_logprobs == "true" else 1
    n = config.algorithm.n_minibatches
    forwards = n - first + n * (config.algorithm.kl_beta > 0)
    passes = forwards + n * (4 if recomputes else 3)
    flops = passes / n * tokens * (2 * active + per_pair * context / 2)
    flops += n_groups * tower * (3 * prompts if weights.trains_vision else 1)
    rows = n_ranks // config.actor.context_parallel_size
    budget = config.runner.max_tokens_per_mbs
    n_micro = max(n, math.ceil(tokens / rows / budget))
    shard = per_node if fsdp.strategy == "hsdp" else n_ranks
    gathers = n_micro * (2 + forwards / n) if fsdp.reshard_after_forward else 1
    # Experts that ranks share out are gathered by fewer of them; tokens go to them instead.
    gathered = weights.total - weights.experts * (1 - 1 / getattr(fsdp, "expert_parallel_size", 1))
    moved = 0.0
    if shard > 1:
        gathered_bytes = gathers * gathered * DTYPES[fsdp.mixed_precision.param_dtype].itemsize
        moved = (gathered_bytes + n_micro * weights.trained * 4) / link(shard)
    exchanged = 0.0
    if getattr(fsdp, "expert_parallel_size", 1) > 1 and mixture is not None:
        state = text.hidden_size * 2 * mixture.top_k * 2 * len(mixture.layers)
        exchanged += passes / n * tokens / n_ranks * state / link(fsdp.expert_parallel_size)
    if config.actor.context_parallel_size > 1:
        state = 2 * text.num_attention_heads * head_dim(text) * 2 * 2 * text.num_hidden_layers
        exchanged += (
            passes / n * tokens / n_ranks * state / link(config.actor.context_parallel_size)
        )
    train = max(flops / n_ranks / products, moved) + exchanged

    trained = weights.shard(n_ranks, trained=True)
    host = shares.links * kind.host
    optimizer = n * trained * 32 / (host / 2 if fsdp.cpu_offload else memory)
    sync = (
        3
        * bytes_.itemsize
        * weights.engine_elements
        / (memory if placement.shared else link(shard))
    )
    offload = 2 * (12 * trained + model.stored * (weights.shard(n_ranks) - trained))
    between = optimizer + sync + (offload / host if config.actor.enable_offload else 0.0)
    gpus = len({*placement.actor, *placement.rollout})
    return StepTime(
        {"generate": generate, "train": train, "between": between},
        config.runner.generates_ahead,
        n_groups * size * (lengths.prompt + lengths.response) / gpus,
    )


def steps_of(config: Config) -> int | None:
    """Return the steps of a run: `runner.max_steps`, or its epochs over rows that are here.

    Rows that the run will filter count. None: there is no limit and some rows are elsewhere.
    """
    runner, paths = config.runner, config.data.train_data_paths
    limit = runner.max_steps if runner.max_steps > 0 else None
    if any(path.startswith(UNCOUNTED_ROWS) for path in paths):
        return limit
    try:
        n_rows = sum(len(open_source(path, "train").rows) for path in paths)
    except (ValueError, OSError):
        return limit
    steps = n_rows // config.data.rollout_batch_size * runner.max_epochs
    return min(steps, limit) if limit else steps or None


def assumptions(arguments: argparse.Namespace, config: Config) -> tuple[GpuKind, Lengths]:
    """Return the kind of GPU and the lengths that options name, or the usual ones."""
    named = {
        "prompt": arguments.prompt_tokens,
        "images": arguments.image_tokens,
        "response": arguments.response_tokens,
        "longest": arguments.longest_response,
    }
    options = {key: value for key, value in named.items() if value is not None}
    lengths = replace(usual_lengths(config), **options)
    if not (0 <= lengths.images <= lengths.prompt and 0 < lengths.response <= lengths.longest):
        raise ConfigError(
            f"--prompt-tokens and the other lengths: {lengths}; images' are at most "
            "the prompt's, the mean at most the longest (--longest-response)"
        )
    kind = arguments.gpu_kind
    return (GPU_KINDS[kind] if kind else kind_of_size(arguments.gpu_memory)), lengths


def seconds_text(fast: float, slow: float) -> str:
    """Return a range of seconds, in two digits: more would promise what it does not know."""
    return " to ".join(f"{float(f'{value:.2g}'):g}" for value in (fast, slow))


def main(arguments: argparse.Namespace, config: Config, hardware: Hardware) -> int:
    """Print the hours of the config's own layout; return 0 if it fits, 1 if it does not."""
    if config.cluster.device == "cpu":
        raise ConfigError(
            "cluster.device: cpu; --time estimates GPUs. On a CPU runner.max_steps=3 takes moments: "
            "time/step of its metrics is measured"
        )
    kind, lengths = assumptions(arguments, config)
    model = Model(config)
    placement = placement_of(config, (hardware.gpus,) * hardware.nodes)
    memory = ledger(config, hardware, model, placement)
    if memory.problems:
        lines = [f"- does not fit: {problem}" for problem in memory.problems]
        sys.stdout.write("\n".join([*lines, "- 'preflight --search' finds layouts"]) + "\n")
        return 1
    fast, slow = (
        estimate_step(memory.config, model, placement, kind, lengths, memory.kv_tokens, shares)
        for shares in (FAST, SLOW)
    )
    steps = steps_of(config)
    hours = [time.total * (steps or 100) / 3600 for time in (fast, slow)]
    span = f"{steps} steps" if steps else "100 steps (neither runner.max_steps nor data name them)"
    lines = [
        f"{config.runner.experiment_name} on {hardware}, a {kind.name}'s data sheet",
        "",
        f"Assumed: {lengths}.",
        "",
        "| | seconds a step |",
        "|---|---:|",
        *(f"| {name} | {seconds_text(fast.phases[name], slow.phases[name])} |" for name in PHASES),
        f"| step | {seconds_text(fast.total, slow.total)} |",
        "",
        f"- {span}: {seconds_text(*hours)} hours",
    ]
    if arguments.price:
        gpus = len({*placement.actor, *placement.rollout})
        lines[-1] += f", {seconds_text(*(gpus * arguments.price * hour for hour in hours))} $"
    lines += [
        "- the ends are what published systems reach; runner.max_steps=3 on the GPUs tells more "
        "(time/step of its metrics)",
        "- 'preflight --search' ranks other layouts",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
