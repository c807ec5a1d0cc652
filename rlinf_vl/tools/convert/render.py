"""The output of a conversion: a commented YAML config, and a summary of a few lines."""

import re
import textwrap
from typing import Any

import yaml

from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.schema import SCHEMA_NAME
from rlinf_vl.tools.convert.convert import KINDS, Conversion, Kind

#: Kinds of keys without a counterpart, in their order below the config, with their headings.
TITLES: dict[Kind, str] = {
    "refused": "Refused: what this means there does not happen here",
    "unknown": "Unknown",
    "dropped": "Dropped: needs no counterpart",
}


def render(conversion: Conversion, source: str) -> str:
    """Return the config as YAML.

    A comment after each value names its source; the keys without a counterpart follow at the end.
    """
    counts = ", ".join(
        f"{len(conversion.of(kind))} {kind}" for kind in KINDS if conversion.of(kind)
    )
    lines = [
        f"# Converted from {source}, a config of {conversion.system} ({counts}); what has no "
        "counterpart stands below."
    ]
    lines += ["defaults:", f"  - {SCHEMA_NAME}", "  - _self_"]
    section: list[str] = []
    for key in [key for key in config_keys() if key in conversion.settings]:
        *parents, leaf = key.split(".")
        # Headings are written from the first level on that differs from the key before.
        shared_depth = next(
            (i for i, (a, b) in enumerate(zip(section, parents, strict=False)) if a != b),
            min(len(section), len(parents)),
        )
        for depth in range(shared_depth, len(parents)):
            lines += ([""] if depth == 0 else []) + [f"{'  ' * depth}{parents[depth]}:"]
        section = parents
        value, comment = conversion.settings[key]
        remark = f"  # {comment}" if comment else ""
        lines.append(f"{'  ' * len(parents)}{leaf}: {_scalar(value)}{remark}")
    for kind, title in TITLES.items():
        by_reason: dict[str, list[str]] = {}
        for outcome in conversion.of(kind):
            by_reason.setdefault(outcome.text, []).append(
                f"{outcome.key}={_shortened(outcome.value)}"
            )
        if by_reason:
            lines += ["", f"# {title}"]
            for reason, keys in by_reason.items():
                text = f"{', '.join(keys)}: {reason.strip()}"
                lines += textwrap.wrap(
                    text,
                    120,
                    initial_indent="# - ",
                    subsequent_indent="#   ",
                    break_on_hyphens=False,
                )
    return "\n".join(lines) + "\n"


def summary(conversion: Conversion, source: str) -> str:
    """Return counts of a file's keys by outcome, and a line for each refused or unknown key."""
    counts = ", ".join(f"{len(conversion.of(kind))} {kind}" for kind in KINDS)
    lines = [f"{source}: {conversion.system}, {len(conversion.outcomes)} keys: {counts}"]
    for outcome in (*conversion.of("refused"), *conversion.of("unknown")):
        value = _shortened(outcome.value)
        lines.append(f"  {outcome.kind}: {outcome.key}={value}: {outcome.text.strip()}")
    for name in conversion.missing:
        if f"config {name}" not in conversion.outcomes:
            lines.append(
                f"  not found near it: {name}; the defaults of {conversion.system} stand for what "
                "it says"
            )
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True
    ).strip()
    return text.removesuffix("...").strip()  # PyYAML ends a lone scalar's document with "..."


def _shortened(value: Any, max_length: int = 60) -> str:
    """Return a value as text in one line of at most `max_length` characters."""
    text = re.sub(r"\s+", " ", str(value))
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"
