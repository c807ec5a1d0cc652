"""A converted config as commented YAML, and what became of the other system's keys in a few lines."""

import re
import textwrap
from typing import Any

import yaml

from rlinf_vl.config.foreign.convert import KINDS, Conversion, Kind
from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.schema import SCHEMA_NAME

TITLES: dict[Kind, str] = {
    "refused": "Refused: what this means there does not happen here",
    "unknown": "Unknown",
    "dropped": "Dropped: needs no counterpart",
}


def render(made: Conversion, source: str) -> str:
    """The config as YAML, each key with where it comes from; below it, what has no counterpart."""
    counts = ", ".join(f"{len(made.of(kind))} {kind}" for kind in KINDS if made.of(kind))
    lines = [f"# Converted from {source}, a config of {made.system} ({counts}); what has no counterpart stands below."]
    lines += ["defaults:", f"  - {SCHEMA_NAME}", "  - _self_"]
    section: list[str] = []
    for key in [key for key in config_keys() if key in made.settings]:
        *parents, leaf = key.split(".")
        shared = next(
            (i for i, (a, b) in enumerate(zip(section, parents, strict=False)) if a != b),
            min(len(section), len(parents)),
        )
        for depth in range(shared, len(parents)):
            lines += ([""] if depth == 0 else []) + [f"{'  ' * depth}{parents[depth]}:"]
        section = parents
        value, comment = made.settings[key]
        remark = f"  # {comment}" if comment else ""
        lines.append(f"{'  ' * len(parents)}{leaf}: {_scalar(value)}{remark}")
    for kind, title in TITLES.items():
        by_reason: dict[str, list[str]] = {}
        for outcome in made.of(kind):
            by_reason.setdefault(outcome.text, []).append(f"{outcome.key}={_shortened(outcome.value)}")
        if by_reason:
            lines += ["", f"# {title}"]
            for reason, keys in by_reason.items():
                text = f"{', '.join(keys)}: {reason.strip()}"
                lines += textwrap.wrap(
                    text, 120, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False
                )
    return "\n".join(lines) + "\n"


def summary(made: Conversion, source: str) -> str:
    """What became of a file's keys, a line for what is refused or unknown."""
    counts = ", ".join(f"{len(made.of(kind))} {kind}" for kind in KINDS)
    lines = [f"{source}: {made.system}, {len(made.outcomes)} keys: {counts}"]
    for o in (*made.of("refused"), *made.of("unknown")):
        lines.append(f"  {o.kind}: {o.key}={_shortened(o.value)}: {o.text.strip()}")
    for name in made.missing:
        if f"config {name}" not in made.outcomes:
            lines.append(f"  not found near it: {name}; the defaults of {made.system} stand for what it says")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True).strip()
    return text.removesuffix("...").strip()


def _shortened(value: Any, most: int = 60) -> str:
    text = re.sub(r"\s+", " ", str(value))
    return text if len(text) <= most else f"{text[: most - 1]}…"
