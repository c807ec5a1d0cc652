"""Print the layouts that a search has found: `preflight --search`."""

import argparse
import sys

from rlinf_vl.config.schema import Config
from rlinf_vl.tools.memory.gpu_kinds import GpuKind
from rlinf_vl.tools.memory.gpu_parts import GIB
from rlinf_vl.tools.memory.hours import PHASES, Lengths, assumptions, seconds_text
from rlinf_vl.tools.memory.ledger import Hardware
from rlinf_vl.tools.memory.search import Found, Search, host_limit


def render_layouts(
    config: Config, hardware: Hardware, kind: GpuKind, lengths: Lengths, result: Found
) -> str:
    """Return the output of `preflight --search` as Markdown."""
    name = config.runner.experiment_name
    lines = [
        f"{name} on {hardware}: {len(result.layouts)} of {result.tried} layouts, ranked by what "
        f"they compute, read and send on a {kind.name}",
        "",
        f"Assumed: {lengths}.",
        "",
    ]
    if result.layouts:
        columns = ["seconds a step", *PHASES, "GPU GiB", "host GiB"]
        lines += [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for number, layout in enumerate(result.layouts, 1):
        peak = max(gpu.peak[0] for gpu in layout.ledger.gpus)
        fast, slow = layout.time, layout.slow
        cells = [
            seconds_text(fast.total, slow.total),
            *(seconds_text(fast.phases[phase], slow.phases[phase]) for phase in PHASES),
            f"{peak / GIB:.1f}",
            f"{layout.host_bytes / GIB:.0f}",
        ]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    names = [f"`{layout.overrides}`" if layout.changes else "as it is" for layout in result.layouts]
    lines += ["", *(f"{number}. {name}" for number, name in enumerate(names, 1)), ""]
    for layout_name, problems in result.natural:
        lines += [f"- {layout_name}, does not fit: {problem}" for problem in problems]
    if not result.layouts:
        lines.append("- no layout fits: take more or larger GPUs, or adapters")
    return "\n".join(lines) + "\n"


def main(arguments: argparse.Namespace, config: Config, hardware: Hardware) -> int:
    """Search layouts of the config; return 0 if any fits, 1 if none does."""
    kind, lengths = assumptions(arguments, config)
    search = Search(
        config,
        hardware,
        kind,
        lengths,
        host_bytes=host_limit(hardware, arguments.host_memory),
        report=lambda text: print(text, file=sys.stderr, flush=True),
    )
    result = search.run()
    sys.stdout.write(render_layouts(config, hardware, kind, lengths, result))
    return 0 if result.layouts else 1
