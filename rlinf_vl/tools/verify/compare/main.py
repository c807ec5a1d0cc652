"""The verb `compare-batch`: reads a batch, compares it, prints a table or JSON."""

import argparse
import json
from typing import Any

from rlinf_vl.tools.verify.compare.batch_file import Batch, read_batch
from rlinf_vl.tools.verify.compare.texts import compare_prompts, compare_rewards
from rlinf_vl.tools.verify.compare.verdict import (
    Comparison,
    Reason,
    compare_numbers,
    first_difference,
)


def main(arguments: argparse.Namespace) -> int:
    """Run the verb; the exit code is 0 without a difference and 1 with one."""
    batch = read_batch(arguments.file)
    comparisons = compare_batch(batch)
    if arguments.json:
        print(json.dumps(as_json(batch, comparisons), indent=1))
    else:
        print(as_table(batch, comparisons))
    return 0 if first_difference(comparisons) is None else 1


def compare_batch(batch: Batch) -> list[Comparison]:
    """Compare all columns of a batch, in the order of computation."""
    return [compare_prompts(batch), compare_rewards(batch), *compare_numbers(batch)]


def as_table(batch: Batch, comparisons: list[Comparison]) -> str:
    """Return the comparison for people."""
    n_tokens = int(batch.mask.sum())
    lines = [
        f"{batch.system}: {batch.n_samples} samples, {n_tokens} tokens with loss, {batch.dtype}",
        "",
        f"{'column':<14}{'state':<14}{'largest':>11}{'bound':>11}  place",
    ]
    first = first_difference(comparisons)
    for comparison in comparisons:
        if comparison.state == "not compared":
            lines.append(f"{comparison.column:<14}{'–':<14}{'':>22}  {comparison.note}")
            continue
        state = "FIRST" if comparison is first else comparison.state
        numbers = f"{comparison.difference:>11.3g}{comparison.tolerance:>11.3g}"
        place = place_of(comparison)
        if comparison.state == "follows":
            place += f"; explained by {comparison.note}"
        lines.append(f"{comparison.column:<14}{state:<14}{numbers}  {place}".rstrip())
    lines.append("")
    if not any(c.state != "not compared" for c in comparisons):
        lines.append("nothing could be compared: see the reasons above")
    elif first is None:
        lines.append("no difference: every column that could be compared agrees within rounding")
    for comparison in comparisons:
        if comparison.state == "differs":
            lines += _explanation(comparison, comparison is first)
    return "\n".join(lines).rstrip()


def place_of(comparison: Comparison) -> str:
    """Return where a column differs most, in words."""
    words = []
    if comparison.sample is not None:
        words.append(f"sample {comparison.sample}")
    if comparison.token is not None:
        words.append(f"token {comparison.token}")
    return ", ".join(words)


def _explanation(comparison: Comparison, is_first: bool) -> list[str]:
    order = "the first column that differs" if is_first else "also differs"
    lines = [
        f"{comparison.column}: {order}, in {comparison.n_differing} of {comparison.n_values} values",
        f"  most at {place_of(comparison) or 'its only value'}: theirs {_number(comparison.theirs)}, "
        f"ours {_number(comparison.ours)}",
    ]
    for number, reason in enumerate(comparison.reasons):
        opening = "reproduced if they" if not number else "or if they"
        lines.append(f"  {opening} {reason.text}")
        lines.append(f"    {_setting(reason)}")
    if not comparison.reasons:
        lines.append("  no known difference reproduces it, alone or with another")
        if comparison.nearest is not None:
            lines.append(f"  the nearest: that they {comparison.nearest.text}")
    return [*lines, ""]


def _setting(reason: Reason) -> str:
    setting = reason.setting()
    return f"ours does the same with {setting}" if setting else "no setting of ours does this"


def _number(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def as_json(batch: Batch, comparisons: list[Comparison]) -> dict[str, Any]:
    """Return the comparison for machines."""
    first = first_difference(comparisons)
    return {
        "system": batch.system,
        "samples": batch.n_samples,
        "tokens": int(batch.mask.sum()),
        "dtype": batch.dtype,
        "first_difference": None if first is None else first.column,
        "columns": [_column_json(comparison) for comparison in comparisons],
    }


def _column_json(comparison: Comparison) -> dict[str, Any]:
    data: dict[str, Any] = {"column": comparison.column, "state": comparison.state}
    if comparison.note:
        data["note"] = comparison.note
    if comparison.state == "not compared":
        return data
    for name in ("difference", "tolerance", "sample", "token", "theirs", "ours"):
        data[name] = getattr(comparison, name)
    data["differing"] = comparison.n_differing
    data["values"] = comparison.n_values
    data["reasons"] = [_reason_json(reason) for reason in comparison.reasons]
    data["nearest"] = _reason_json(comparison.nearest) if comparison.nearest else None
    return data


def _reason_json(reason: Reason) -> dict[str, Any]:
    return {
        "names": [variant.name for variant in reason.variants],
        "text": reason.text,
        "setting": reason.setting() or None,
    }
