"""The ledger as a table of phases and parts, and the verb `preflight`."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from rlinf_vl.config.load import load_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.errors import ConfigError
from rlinf_vl.preflight.advice import advise
from rlinf_vl.preflight.ledger import GIB, PARTS, Gpu, Hardware, Ledger, largest_budget, ledger
from rlinf_vl.preflight.model import Model


def render(made: Ledger, largest: int = 0, advice: Sequence[str] = ()) -> str:
    """Return what `preflight` prints, as Markdown: a table for each kind of GPU (GiB by part and phase), and what follows.

    Args:
        largest: the largest token budget that fits, where it is known.
        advice: what to do about the problems.
    """
    config, hardware = made.config, made.hardware
    lines = [f"{config.runner.experiment_name} on {hardware}; the model's shape is from {made.said}", ""]
    for gpu in made.gpus:
        peak, phase = gpu.peak
        said = f"- {gpu.role}: at most {peak / GIB:.1f} of {hardware.usable / GIB:.1f} GiB, in {phase}"
        lines += [*_table(gpu), "", said, ""]
    auto = " (auto)" if config.rollout.gpu_memory_utilization == "auto" else ""
    lines += [
        f"- rollout.gpu_memory_utilization {made.share:.2f}{auto}: a KV cache of {made.kv_tokens} tokens,"
        f" {made.kv_tokens // config.runner.seq_length} responses of the longest at once, of"
        f" rollout.max_running_requests {config.rollout.max_running_requests}",
        f"- runner.max_tokens_per_mbs {config.runner.max_tokens_per_mbs}: {made.trace.operations} operations, of which"
        f" {sum(made.trace.synchronising.values())} wait for the GPU, in a micro-batch's forward and backward",
    ]
    if largest:
        lines.append(f"- the largest runner.max_tokens_per_mbs that fits, up to four times this one, is {largest}")
    lines += [f"- does not fit: {problem}" for problem in made.problems]
    lines += [f"- advice: {line}" for line in advice]
    return "\n".join(lines) + "\n"


def _table(gpu: Gpu) -> list[str]:
    """Return a table of parts and phases that a terminal of 80 columns holds."""
    parts = [part for part in PARTS if any(phase.get(part) for phase in gpu.phases.values())]
    width = max(map(len, [*parts, gpu.role]))
    widths = [max(5, len(phase)) for phase in gpu.phases]

    def row(name: str, cells: Iterable[str]) -> str:
        aligned = (f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=True))
        return f"| {name:<{width}} | " + " | ".join(aligned) + " |"

    ruler = "".join(f"{'-' * (size + 1)}:|" for size in widths)
    rows = [row(gpu.role, gpu.phases), f"|{'-' * (width + 2)}|{ruler}"]
    rows += [row(p, (_gib(phase.get(p, 0)) for phase in gpu.phases.values())) for p in parts]
    return [*rows, row("total", (_gib(sum(phase.values())) for phase in gpu.phases.values()))]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size else ""


def main(arguments: argparse.Namespace) -> int:
    """`python -m rlinf_vl preflight CONFIG`: exit code 0 if it fits, 1 if it does not."""
    config = load_config(arguments.config, arguments.overrides)
    if config.cluster.device == "cpu":
        raise ConfigError("cluster.device: cpu; preflight counts the memory of GPUs: add cluster.device=cuda")
    # no GPU at all is the placement's to refuse
    asked = ("gpus", arguments.gpus, 0), ("gpu-memory", arguments.gpu_memory, 1), ("nodes", arguments.nodes, 1)
    for option, value, least in asked:
        if not least <= value < 1e6:  # "nan", too
            raise ConfigError(
                f"--{option} {value}: give a number from {least} on, as in --gpus 8 --gpu-memory 80 --nodes 2"
            )
    hardware = Hardware.named(arguments.gpus, arguments.gpu_memory, arguments.nodes)
    model = Model(config)
    made = ledger(config, hardware, model)
    largest = 0 if made.problems else largest_budget(made, model)
    sys.stdout.write(render(made, largest, advise(made, model) if made.problems else ()))
    there = placement_of(config, (hardware.gpus,) * hardware.nodes).map()
    sys.stdout.write("\nWho sits where:\n\n" + "".join(f"- {line}\n" for line in there.splitlines()))
    return 1 if made.problems else 0
