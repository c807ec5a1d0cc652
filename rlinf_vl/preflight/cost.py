"""Estimate what a run costs: seconds of each phase, hours, tokens and dollars; `preflight --time`.

The rates are those that `calibrate` measured on this machine with this model, or the assumed ones
of a kind of GPU. Every split of the slots is combined with every schedule that it allows. The
splits, the memory and the ranking are those of `preflight --search`. A run's folder has the estimate
of its own layout (`prediction`).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_vl.config.placement import Placement, placement_of, slots_named
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.runner import SCHEDULES_AHEAD
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import validate_config
from rlinf_vl.data.sources import open_source
from rlinf_vl.errors import ConfigError
from rlinf_vl.preflight.advice import applied
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.layout_table import assumptions, lengths_text
from rlinf_vl.preflight.ledger import Hardware
from rlinf_vl.preflight.model import Model
from rlinf_vl.preflight.prediction import UNBOUNDED, settled_on_cpu
from rlinf_vl.preflight.rates import Rates
from rlinf_vl.preflight.search import (
    fastest_first,
    fitting_memory,
    host_limit,
    overrides_text,
    variants,
)
from rlinf_vl.preflight.step_time import PHASES, StepTime, estimate_step

SCHEDULES = ("sync", *SCHEDULES_AHEAD)
#: Beginnings of data sets that an estimate neither fetches nor draws.
UNCOUNTED_ROWS = ("hf://", "verifiers://", *TOYS)


@dataclass(frozen=True)
class Cost:
    """The estimate of one split and schedule.

    Attributes:
        overrides: what differs from the config; "" for its own layout.
        steps: of the run, None where the config does not say.
    """

    overrides: str
    time: StepTime
    steps: int | None

    @property
    def name(self) -> str:
        """The overrides, or that there are none."""
        return self.overrides or "as it is"

    @property
    def hours(self) -> float:
        """Hours of the run; of a hundred steps where their number is unknown."""
        return self.time.total * (self.steps or 100) / 3600

    def dollars(self, price: float) -> float:
        """Return what the slots cost, at a price for each and hour."""
        return self.hours * self.time.slots * price


def costs(
    config: Config,
    model: Model,
    hardware: Hardware | None,
    rates: Rates,
    lengths: Lengths,
    host_gib: float | None = None,
) -> list[Cost]:
    """Estimate every split and schedule that is valid and fits, the fastest first."""
    estimates: list[Cost] = []
    steps = steps_of(config)
    layouts: list[tuple[object, ...]] = []
    for changes in variants(config, hardware, SCHEDULES):
        try:
            changed = applied(config, changes)
            placement = placement_on(changed, hardware)
            layout = (placement, changed.runner.schedule)
            if layout in layouts:
                continue
            layouts.append(layout)
            validate_config(changed, needs_machine=False)
            time = estimate(changed, model, hardware, rates, lengths, placement, host_gib)
        except (ConfigError, ValueError):
            continue
        if time is not None:
            estimates.append(Cost(overrides_text(changes), time, steps))
    return fastest_first(estimates)


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


def placement_on(config: Config, hardware: Hardware | None) -> Placement:
    """Return the config's placement on hardware; None: on a CPU with the slots that it names."""
    if hardware is None:
        return placement_of(config, (slots_named(config),))
    return placement_of(config, (hardware.gpus,) * hardware.nodes)


def estimate(
    config: Config,
    model: Model,
    hardware: Hardware | None,
    rates: Rates,
    lengths: Lengths,
    placement: Placement,
    host_gib: float | None = None,
) -> StepTime | None:
    """Estimate a step; None where the config does not fit.

    Args:
        hardware: None for a CPU.
        host_gib: memory of a machine; None: what `preflight --search` assumes.
    """
    if hardware is None:
        config = settled_on_cpu(config)
        return estimate_step(config, model, placement, rates, lengths, UNBOUNDED)
    fit = fitting_memory(config, hardware, model, placement, host_limit(hardware, host_gib))
    if fit is None:
        return None
    memory, _ = fit
    # The ledger's config has values for what is automatic.
    return estimate_step(memory.config, model, placement, rates, lengths, memory.kv_tokens)


def render(
    config: Config, estimates: Sequence[Cost], rates: Rates, lengths: Lengths, price: float | None
) -> str:
    """Return the output of `preflight --time` as Markdown."""
    steps = estimates[0].steps
    span = (
        f"{steps} steps"
        if steps
        else "100 steps (neither runner.max_steps nor data here name them)"
    )
    lines = [
        f"{config.runner.experiment_name}, {span}; rates: {rates.source}",
        "",
        f"Assumed: {lengths_text(lengths)}.",
        "",
    ]
    dollars = ["$"] if price else []
    columns = ["s/step", *PHASES, "hours", "tokens/s/slot", *dollars]
    lines += [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for cost in estimates:
        cells = [
            _seconds(cost.time.total),
            *(_seconds(cost.time.phases[phase]) for phase in PHASES),
            f"{cost.hours:.2f}",
            f"{cost.time.tokens_per_slot:.0f}",
            *([f"{cost.dollars(price):.2f}"] if price else []),
        ]
        lines.append(f"| {cost.name} | {' | '.join(cells)} |")
    schedule = config.runner.schedule
    # Another schedule trains on answers of older weights: it is no layout of the same run.
    alike = [cost for cost in estimates if cost.time.schedule == schedule]
    lines.append("")
    if alike:
        cheapest = min(alike, key=lambda cost: cost.hours * cost.time.slots)
        lines.append(f"- fastest with runner.schedule={schedule}: {alike[0].name}")
        lines.append(f"- cheapest with runner.schedule={schedule}: {cheapest.name}")
    if estimates[0] not in alike:
        lines.append(f"- fastest with another schedule: {estimates[0].name}")
    if config.cluster.device != "cpu":
        lines.append(
            "- 'preflight --search' ranks these beside layouts with other engines and shards"
        )
    return "\n".join(lines) + "\n"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: argparse.Namespace, config: Config, hardware: Hardware) -> int:
    """Print the cost of each split and schedule; return 0 if any fits, 1 if none does."""
    rates, lengths = assumptions(arguments, config)
    on_cpu = config.cluster.device == "cpu"
    model = Model(config)
    estimates = costs(
        config, model, None if on_cpu else hardware, rates, lengths, arguments.host_memory
    )
    if not estimates:
        sys.stdout.write("no split fits: see preflight --search\n")
        return 1
    sys.stdout.write(render(config, estimates, rates, lengths, arguments.price))
    return 0
