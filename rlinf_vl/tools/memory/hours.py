"""Estimate the hours of a run as a range; `preflight --time`.

Each phase takes what it computes, reads or sends, over what its GPUs can, times a share that is
reached. The shares are those between which published systems lie (`Shares`), so the two ends differ
by a factor of 2 to 5. Nothing of it was measured with this package on a GPU. What narrows it is
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
from rlinf_vl.tools.memory.gpu_kinds import GPU_KINDS, GpuKind, kind_of_size
from rlinf_vl.tools.memory.ledger import Hardware, ledger
from rlinf_vl.tools.memory.model import Model, expert_parallel_size

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
    """Tokens of a prompt, of its images among them, and of a response: means, and the longest.

    `prompt_copies`: how often training computes a group's prompt; other systems do for each
    response.
    """

    prompt: float
    images: float
    response: float
    longest: float
    prompt_copies: int = 1

    def __str__(self) -> str:
        return (
            f"prompts of {self.prompt:.0f} tokens, {self.images:.0f} of them images'; responses "
            f"of {self.response:.0f}, the longest {self.longest:.0f}"
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step's phases at one end of the range, and whether generating and training overlap."""

    phases: dict[str, float]
    overlaps: bool

    @property
    def total(self) -> float:
        """The seconds of a step."""
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
    run = _Run(config, model, placement, kind, lengths, shares)
    phases = {"generate": run.generate(kv_tokens), "train": run.train(), "between": run.between()}
    return StepTime(phases, config.runner.generates_ahead)


class _Run:
    """Sizes of the model and of the batch, and rates of a GPU, for the phases of a step."""

    def __init__(
        self, config: Config, model: Model, placement: Placement, kind: GpuKind, lengths: Lengths,
        shares: Shares,
    ) -> None:  # fmt: skip
        self.config, self.model, self.placement, self.kind = config, model, placement, kind
        self.lengths, self.shares = lengths, shares
        text, weights, self.mixture = model.shape.get_text_config(), model.weights, model.mixture
        self.text = text
        #: Weights that every token uses, those that one token uses, and bytes of one in an engine.
        self.dense = weights.total - weights.tower - weights.experts
        self.active = self.dense
        if self.mixture is not None:
            self.active += weights.experts * self.mixture.top_k / self.mixture.experts
        self.dtype = DTYPES[config.rollout.model.precision]
        #: FLOPs of attention for a pair of tokens, and of the tower for a prompt's images.
        self.per_pair = 4 * text.num_attention_heads * head_dim(text) * text.num_hidden_layers
        self.tower = 2 * weights.tower * 4 * lengths.images  # about four patches make a token
        self.context = lengths.prompt + lengths.response / 2
        self.n_groups, self.group_size = config.data.rollout_batch_size, config.algorithm.group_size
        self.products, self.memory = shares.products * kind.products, shares.memory * kind.memory
        nodes = [placement.node_of(slot) for slot in placement.actor]
        self.n_ranks, self.per_node = len(nodes), nodes.count(nodes[0])
        sharded_on_a_node = config.actor.fsdp_config.strategy == "hsdp"
        self.shard = self.per_node if sharded_on_a_node else self.n_ranks

    def link(self, ranks: int) -> float:
        """Return the bytes a second between so many ranks."""
        kind = self.kind
        return self.shares.links * (kind.network if ranks > self.per_node else kind.node)

    def generate(self, kv_tokens: int) -> float:
        """Return the seconds of an engine that decodes as many responses at once as it can, and one
        for as many tokens as the longest has."""
        lengths, mixture, rollout = self.lengths, self.mixture, self.config.rollout
        gpus = rollout.tensor_parallel_size
        responses = self.n_groups * self.group_size / max(1, len(self.placement.rollout) // gpus)
        tokens_of_one = lengths.prompt / self.group_size + (lengths.response + lengths.longest) / 2
        running = max(1.0, min(responses, rollout.max_running_requests, kv_tokens // tokens_of_one))
        steps = lengths.longest + max(0.0, responses / running - 1) * lengths.response
        touched = 1.0 if mixture is None else 1 - (1 - mixture.top_k / mixture.experts) ** running
        state = self.model.family.decode_state(self.model.shape).token_bytes(self.dtype)
        read = self.dtype.itemsize * (self.dense + touched * self.model.weights.experts)
        read += running * self.context * state
        decode = max(read / self.memory, 2 * self.active * running / self.products) / gpus
        prompt = 2 * self.active * lengths.prompt + self.per_pair * lengths.prompt**2 / 2
        prompts = responses / self.group_size * (prompt + self.tower)
        return steps * decode + prompts / (self.products * gpus)

    def train(self) -> float:
        """Return the seconds of the passes over all tokens; a group's prompt counts once where it is
        shared."""
        config, lengths, weights = self.config, self.lengths, self.model.weights
        fsdp, algorithm = config.actor.fsdp_config, config.algorithm
        prompts = lengths.prompt_copies
        tokens = self.n_groups * (prompts * lengths.prompt + self.group_size * lengths.response)
        n = algorithm.n_minibatches
        forwards = n * (algorithm.kl_beta > 0) + n - (algorithm.recompute_logprobs != "true")
        passes = forwards + n * (4 if fsdp.gradient_checkpointing != "none" else 3)
        passed_tokens = passes / n * tokens
        flops = passed_tokens * (2 * self.active + self.per_pair * self.context / 2)
        flops += self.n_groups * self.tower * (3 * prompts if weights.trains_vision else 1)

        context, experts = config.actor.context_parallel_size, expert_parallel_size(config)
        rows = self.n_ranks // context
        n_micro = max(n, math.ceil(tokens / rows / config.runner.max_tokens_per_mbs))
        gathers = n_micro * (2 + forwards / n) if fsdp.reshard_after_forward else 1
        moved = 0.0
        if self.shard > 1:
            # Experts that ranks share out are gathered by fewer of them; tokens go to them instead.
            gathered = weights.total - weights.experts * (1 - 1 / experts)
            gathered_bytes = gathers * gathered * DTYPES[fsdp.mixed_precision.param_dtype].itemsize
            moved = (gathered_bytes + n_micro * weights.trained * 4) / self.link(self.shard)
        exchanged, text = 0.0, self.text
        if experts > 1 and self.mixture is not None:
            state = text.hidden_size * 2 * self.mixture.top_k * 2 * len(self.mixture.layers)
            exchanged += passed_tokens / self.n_ranks * state / self.link(experts)
        if context > 1:
            state = 2 * text.num_attention_heads * head_dim(text) * 2 * 2 * text.num_hidden_layers
            exchanged += passed_tokens / self.n_ranks * state / self.link(context)
        return max(flops / self.n_ranks / self.products, moved) + exchanged

    def between(self) -> float:
        """Return the seconds of optimizer steps, of the weights' way to engines, and of memory that
        goes to the host and back."""
        config, weights = self.config, self.model.weights
        trained = weights.shard(self.n_ranks, trained=True)
        host = self.shares.links * self.kind.host
        offloads_optimizer = config.actor.fsdp_config.cpu_offload
        state_bandwidth = host / 2 if offloads_optimizer else self.memory
        optimizer = config.algorithm.n_minibatches * trained * 32 / state_bandwidth
        bandwidth = self.memory if self.placement.shared else self.link(self.shard)
        sync = 3 * self.dtype.itemsize * weights.engine_elements / bandwidth
        if not config.actor.enable_offload:
            return optimizer + sync
        frozen = weights.shard(self.n_ranks) - trained
        return optimizer + sync + 2 * (12 * trained + self.model.stored * frozen) / host


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
