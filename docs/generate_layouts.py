"""Writes the layouts of mixtures in docs/cost.md: `python docs/generate_layouts.py`.

They are what `preflight --search` finds for two models on 8 to 128 GPUs, in half a minute.
tests/checks/documentation.py compares the page with it.
"""

import runpy
import sys
import time
from pathlib import Path

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import shares_slots
from rlinf_vl.tools.memory.gpu_kinds import kind_of_size
from rlinf_vl.tools.memory.gpu_parts import GIB
from rlinf_vl.tools.memory.hours import usual_lengths
from rlinf_vl.tools.memory.ledger import Hardware
from rlinf_vl.tools.memory.model import Model
from rlinf_vl.tools.memory.search import Found, Layout, Search

PAGE = Path(__file__).with_name("cost.md")
with_tables = runpy.run_path(str(PAGE.with_name("marked_tables.py")))["with_tables"]
#: Configs, and what they are to fit: GB of a card, and machines of 8 cards.
CASES = {
    "qwen3-vl-30b-a3b-grpo-fsdp-geo3k": ((80, 1), (80, 2), (141, 1)),
    "qwen3-vl-235b-a22b-grpo-fsdp-geo3k": ((80, 8), (80, 16), (141, 8)),
}
COLUMNS = (
    "GPUs",
    "actor",
    "engine TP",
    "experts over",
    "recomputes",
    "offload",
    "micro-batch",
    "s/step",
    "GPU GiB",
    "host GiB",
)


def shown(layout: Layout) -> list[str]:
    """Return the cells of a layout, but for the first."""
    config, fsdp = layout.config, layout.config.actor.fsdp_config
    placement = config.cluster.component_placement
    offloads = {"cpu_offload": fsdp.cpu_offload, "enable_offload": config.actor.enable_offload}
    peak = max(gpu.peak[0] for gpu in layout.ledger.gpus)
    return [
        "all, shared" if shares_slots(placement) else str(placement["actor"]),
        str(config.rollout.tensor_parallel_size),
        str(fsdp.expert_parallel_size),
        fsdp.gradient_checkpointing,
        next((name for name, is_set in offloads.items() if is_set), "–"),
        str(config.runner.max_tokens_per_mbs),
        f"{layout.time.total:.0f}",
        f"{peak / GIB:.1f}",
        f"{layout.host_bytes / GIB:.0f}",
    ]


def chosen(found: Found) -> list[Layout]:
    """Return the best layout that shares its GPUs, and the best that splits them."""
    by_kind: dict[bool, Layout] = {}
    for layout in found.layouts:
        by_kind.setdefault(shares_slots(layout.config.cluster.component_placement), layout)
    return list(by_kind.values())


def table(name: str, clusters: tuple[tuple[int, int], ...]) -> str:
    """Return the table of one model, by what the searches find."""
    config = parse_config(name)
    models: dict[tuple[object, ...], dict[str, Model]] = {}
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    for card, nodes in clusters:
        start = time.process_time()
        hardware = Hardware.named(8, card, nodes)
        kind, lengths = kind_of_size(card), usual_lengths(config)
        search = Search(config, hardware, kind, lengths, models=models, report=_report)
        found = search.run(max_layouts=8)
        first = f"{8 * nodes} × {card} GB"
        rows = [shown(layout) for layout in chosen(found)]
        lines += [f"| {first} | {' | '.join(cells)} |" for cells in rows]
        if not rows:
            lines.append(f"| {first} | none fits |" + " |" * (len(COLUMNS) - 2))
        _report(f"{first}: {rows}, {time.process_time() - start:.0f} CPU seconds")
    return "\n".join(lines)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def render_page() -> str:
    """Return docs/cost.md with the tables as the searches find them."""
    tables = [f"`{name}`:\n\n{table(name, clusters)}" for name, clusters in CASES.items()]
    return with_tables(PAGE.read_text(encoding="utf-8"), {"layouts": "\n\n".join(tables)})


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
