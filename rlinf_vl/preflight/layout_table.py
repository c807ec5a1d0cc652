"""Print the layouts that a search has found: `preflight --search`."""

import argparse
import sys
from dataclasses import replace

from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.gpu_kinds import GPU_KINDS, GpuKind, kind_of_size
from rlinf_vl.preflight.gpu_parts import GIB
from rlinf_vl.preflight.ledger import Hardware
from rlinf_vl.preflight.prediction import known_rates
from rlinf_vl.preflight.rates import Rates, rates_of
from rlinf_vl.preflight.search import Found, Search, host_limit
from rlinf_vl.preflight.step_time import PHASES, usual_lengths


def render_layouts(
    config: Config, hardware: Hardware, rates: Rates, lengths: Lengths, result: Found
) -> str:
    """Return the output of `preflight --search` as Markdown."""
    name = config.runner.experiment_name
    lines = [
        f"{name} on {hardware}: {len(result.layouts)} of {result.tried} layouts; rates: {rates.source}",
        "",
        f"Assumed: {lengths_text(lengths)}.",
        "",
    ]
    if result.layouts:
        columns = ["seconds", *PHASES, "tokens/s/GPU", "GPU GiB", "host GiB"]
        lines += [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for number, layout in enumerate(result.layouts, 1):
        peak = max(gpu.peak[0] for gpu in layout.ledger.gpus)
        cells = [
            f"{layout.time.total:.0f}",
            *(f"{layout.time.phases[phase]:.1f}" for phase in PHASES),
            f"{layout.time.tokens_per_slot:.0f}",
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


def lengths_text(lengths: Lengths) -> str:
    """Return lengths in words."""
    return (
        f"prompts of {lengths.prompt:.0f} tokens, {lengths.images:.0f} of them images'; responses "
        f"of {lengths.response:.0f}, the longest {lengths.longest:.0f}"
    )


def lengths_of(arguments: argparse.Namespace, usual: Lengths) -> Lengths:
    """Return the lengths that options name, and the usual ones for the others."""
    options = {
        "prompt": arguments.prompt_tokens,
        "images": arguments.image_tokens,
        "response": arguments.response_tokens,
        "longest": arguments.longest_response,
    }
    named = {key: value for key, value in options.items() if value is not None}
    lengths = replace(usual, **named)
    if not (0 <= lengths.images <= lengths.prompt and 0 < lengths.response <= lengths.longest):
        raise ConfigError(
            f"--prompt-tokens and the other lengths: {lengths_text(lengths)}; images' are at most "
            "the prompt's, the mean at most the longest (--longest-response)"
        )
    return lengths


def kind_of(arguments: argparse.Namespace) -> GpuKind:
    """Return the kind of GPU that options name, or the usual one of its size."""
    if arguments.gpu_kind is None:
        return kind_of_size(arguments.gpu_memory)
    return GPU_KINDS[arguments.gpu_kind]


def assumptions(arguments: argparse.Namespace, config: Config) -> tuple[Rates, Lengths]:
    """Return the rates and lengths of an estimate.

    They are those that `calibrate` measured here with the model, or a kind of GPU's and the usual
    lengths; lengths that options name come first.

    Raises:
        ConfigError: the run is on a CPU that was not measured.
    """
    calibrated = known_rates(config)
    on_cpu = config.cluster.device == "cpu"
    if on_cpu and calibrated is None:
        raise ConfigError(
            f"rollout.model.model_path: {config.rollout.model.model_path} has not been measured on "
            f"this machine's CPU; run 'rlinf-vl calibrate {arguments.config}' first"
        )
    if calibrated is None or (not on_cpu and arguments.gpu_kind is not None):
        rates, lengths = rates_of(kind_of(arguments)), usual_lengths(config)
    else:
        rates, lengths = calibrated
    return rates, lengths_of(arguments, lengths)


def main(arguments: argparse.Namespace, config: Config, hardware: Hardware) -> int:
    """Search layouts of the config; return 0 if any fits, 1 if none does."""
    rates, lengths = assumptions(arguments, config)
    search = Search(
        config,
        hardware,
        rates,
        lengths,
        host_bytes=host_limit(hardware, arguments.host_memory),
        report=lambda text: print(text, file=sys.stderr, flush=True),
    )
    result = search.run()
    sys.stdout.write(render_layouts(config, hardware, rates, lengths, result))
    return 0 if result.layouts else 1
