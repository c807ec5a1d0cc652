"""Print the memory ledger as a table of phases and parts: the verb `preflight`."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from rlinf_vl.config.load import load_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.memory import hours, layout_table
from rlinf_vl.tools.memory.advice import advise
from rlinf_vl.tools.memory.gpu_parts import GIB, PARTS
from rlinf_vl.tools.memory.ledger import (
    AUTOMATIC,
    MARGIN_BYTES,
    Gpu,
    Hardware,
    Ledger,
    largest_budget,
    ledger,
)
from rlinf_vl.tools.memory.model import Model


def render(memory_ledger: Ledger, largest: int = 0, advice: Sequence[str] = ()) -> str:
    """Return the output of `preflight` as Markdown.

    It is a table for each kind of GPU (GiB by part and phase), and lines of findings and advice.

    Args:
        largest: the largest token budget that fits, where it is known.
        advice: how to mend the problems.
    """
    config, hardware = memory_ledger.config, memory_ledger.hardware
    lines = [
        f"{config.runner.experiment_name} on {hardware}; the model's shape is from "
        f"{memory_ledger.shape_source}",
        "",
    ]
    for gpu in memory_ledger.gpus:
        lines += [*_table(gpu), "", f"- {gpu.role}: {gpu.peak_text(hardware.usable)}", ""]
    auto = ""
    if config.rollout.gpu_memory_utilization == "auto":
        auto = " (auto)"
        if memory_ledger.gpus[0].role == "collocated" and not memory_ledger.problems:
            auto = f" (auto, which leaves {MARGIN_BYTES / GIB:g} GiB free where it can)"
    lines += [
        f"- rollout.gpu_memory_utilization {memory_ledger.share:.2f}{auto}: a KV cache of "
        f"{memory_ledger.kv_tokens} tokens, {memory_ledger.kv_tokens // config.runner.seq_length} "
        "responses of the longest at once, of rollout.max_running_requests "
        f"{config.rollout.max_running_requests}",
        f"- runner.max_tokens_per_mbs {config.runner.max_tokens_per_mbs}: "
        f"{memory_ledger.trace.operations} operations, of which "
        f"{sum(memory_ledger.trace.synchronising.values())} wait for the GPU, in a micro-batch's "
        "forward and backward",
    ]
    fsdp = config.actor.fsdp_config
    for key in AUTOMATIC:
        automatic = " (auto)" if key in memory_ledger.settled else ""
        value = str(getattr(fsdp, key)).lower()
        lines.append(f"- actor.fsdp_config.{key} {value}{automatic}")
    if largest:
        lines.append(
            "- the largest runner.max_tokens_per_mbs that fits, up to four times this one, is "
            f"{largest}"
        )
    lines += [f"- does not fit: {problem}" for problem in memory_ledger.problems]
    lines += [f"- advice: {line}" for line in advice]
    return "\n".join(lines) + "\n"


def _table(gpu: Gpu) -> list[str]:
    """Return a table of parts and phases, for a terminal of 80 columns."""
    used_parts = {part for phase in gpu.phases.values() for part, size in phase.items() if size}
    parts = [part for part in PARTS if part in used_parts]
    width = max(map(len, [*parts, gpu.role]))
    widths = [max(5, len(phase)) for phase in gpu.phases]

    def row(name: str, cells: Iterable[str]) -> str:
        aligned = (f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=True))
        return f"| {name:<{width}} | " + " | ".join(aligned) + " |"

    ruler = "".join(f"{'-' * (size + 1)}:|" for size in widths)
    rows = [row(gpu.role, gpu.phases), f"|{'-' * (width + 2)}|{ruler}"]
    for part in parts:
        rows.append(row(part, (_gib(phase.get(part, 0)) for phase in gpu.phases.values())))
    return [*rows, row("total", (_gib(sum(phase.values())) for phase in gpu.phases.values()))]


def _gib(size: int) -> str:
    """Return a cell of the table: bytes in GiB; empty for none."""
    return f"{size / GIB:.1f}" if size else ""


def main(arguments: argparse.Namespace) -> int:
    """Run `rlinf-vl preflight CONFIG`; return 0 if it fits, 1 if it does not."""
    # Often asked on another machine than the run's, without its data and trackers.
    config = load_config(arguments.config, arguments.overrides, needs_machine=False)
    if config.cluster.device == "cpu":
        raise ConfigError(
            "cluster.device: cpu; --time estimates GPUs. On a CPU runner.max_steps=3 takes moments: "
            "time/step of its metrics is measured"
            if arguments.time
            else "cluster.device: cpu; preflight counts the memory of GPUs: add cluster.device=cuda"
        )
    # The placement refuses 0 GPUs, with a better message.
    options = [
        ("gpus", arguments.gpus, 0),
        ("gpu-memory", arguments.gpu_memory, 1),
        ("nodes", arguments.nodes, 1),
    ]
    for option, value, minimum in options:
        if not minimum <= value < 1e6:  # also false for nan
            raise ConfigError(
                f"--{option} {value}: give a number from {minimum} on, as in --gpus 8 --gpu-memory "
                "80 --nodes 2"
            )
    hardware = Hardware.named(arguments.gpus, arguments.gpu_memory, arguments.nodes)
    if arguments.time:
        return hours.main(arguments, config, hardware)
    if arguments.search:
        return layout_table.main(arguments, config, hardware)
    model = Model(config)
    memory_ledger = ledger(config, hardware, model)
    # What does not fit at all has no largest budget, and to look for one takes seconds.
    largest = 0 if memory_ledger.problems else largest_budget(memory_ledger, model)
    sys.stdout.write(
        render(
            memory_ledger, largest, advise(memory_ledger, model) if memory_ledger.problems else ()
        )
    )
    placement_map = placement_of(config, (hardware.gpus,) * hardware.nodes).map()
    sys.stdout.write(
        "\nWho sits where:\n\n" + "".join(f"- {line}\n" for line in placement_map.splitlines())
    )
    return 1 if memory_ledger.problems else 0
