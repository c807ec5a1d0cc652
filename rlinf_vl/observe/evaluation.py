"""What an evaluation says: pass@k with standard errors, in all, by columns of the rows and by number of turns.

Samples of one problem are not independent, problems are: every mean is one over problems of what a problem's samples give, and its
standard error is theirs, s / √N (Miller 2024, "Adding Error Bars to Evals", section 2.2, clusters of one size). In pass@k a
trajectory with an error is a wrong answer, since leaving it out would favour what survives; the other means leave it out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlinf_vl.observe.metrics import env_metrics, part_metrics
from rlinf_vl.types import GroupSummary

TERMINAL_WIDTH = 80
"""Columns of a terminal; a table that is wider would be broken inside its lines."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k samples is right, estimated without bias from `correct` right ones of n ≥ k:
    1 − C(n − c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean over problems, its standard error, and how many problems there are; null where there are too few."""
    n = len(values)
    return {
        "mean": float(np.mean(values)) if n else None,
        "standard_error": float(np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else None,
        "problems": n,
    }


def evaluation(summaries: Sequence[GroupSummary], samples: int, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The figures of one group per problem, as `eval.json` has them.

    Args:
        samples: trajectories of each group.
        columns: by name, a value for each group; a table is made of each.
    """
    made = _figures(summaries, samples)
    answered = [(s, i) for s in summaries for i, error in enumerate(s.errors) if error is None]
    made["by_turns"] = {
        str(turns): {
            "trajectories": len(found := [s.correct[i] for s, i in answered if s.turns[i] == turns]),
            "accuracy": sum(found) / len(found),
        }
        for turns in sorted({s.turns[i] for s, i in answered})
    }
    made["env"] = {name.removeprefix("env/"): value for name, value in env_metrics(summaries).items()}
    made["reward_parts"] = {name.removeprefix("reward/"): value for name, value in part_metrics(summaries).items()}
    made["tables"] = {}
    for name, values in columns.items():
        parts: dict[str, list[GroupSummary]] = {}
        for summary, value in zip(summaries, values, strict=True):
            parts.setdefault("–" if value is None else str(value), []).append(summary)
        made["tables"][name] = {value: _figures(part, samples) for value, part in sorted(parts.items(), key=_natural)}
    return made


def _natural(item: tuple[str, Any]) -> tuple[bool, float, str]:
    """Numbers by size, before names."""
    try:
        return False, float(item[0]), item[0]
    except ValueError:
        return True, 0.0, item[0]


def _figures(summaries: Sequence[GroupSummary], samples: int) -> dict[str, Any]:
    answered = [[i for i, error in enumerate(s.errors) if error is None] for s in summaries]
    pairs = [(s, places) for s, places in zip(summaries, answered, strict=True) if places]
    right = [(len(s.errors), sum(s.correct[i] for i in places)) for s, places in zip(summaries, answered, strict=True)]
    each = [(s, i) for s, places in pairs for i in places]
    ks = sorted({2**e for e in range(samples.bit_length()) if 2**e <= samples} | {samples})
    return {
        **{f"pass@{k}": mean_and_error([pass_at_k(n, c, k) for n, c in right if n >= k]) for k in ks},
        "reward": mean_and_error([float(np.mean([s.rewards[i] for i in places])) for s, places in pairs]),
        "turns": {"mean": _mean(s.turns[i] for s, i in each), "max": max((s.turns[i] for s, i in each), default=0)},
        "response_tokens": _mean(s.response_tokens[i] for s, i in each),
        "truncated": _mean(s.statuses[i] == "length" for s, i in each),
        "trajectories": len(each),
        "errors": dict(Counter(error.partition(": ")[0] for s in summaries for error in s.errors if error is not None)),
        "ungradable": sum(s.ungradable for s in summaries),
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def render(made: Mapping[str, Any]) -> str:
    """Return the figures of `evaluation` as Markdown tables that fit a terminal of `TERMINAL_WIDTH`."""
    passes = [name for name in made if name.startswith("pass@")]
    header = ["", "problems", *passes, "reward", "turns", "tokens", "errors"]

    def line(name: str, figures: Mapping[str, Any]) -> list[str]:
        counts = [str(figures["pass@1"]["problems"]), *(_plus_minus(figures[p]) for p in (*passes, "reward"))]
        means = [_number(figures["turns"]["mean"], 1), _number(figures["response_tokens"], 0)]
        return [name, *counts, *means, str(sum(figures["errors"].values()))]

    tables = [[header, line("all", made)]]
    for name, parts in made["tables"].items():
        tables.append([[name, *header[1:]], *(line(value, figures) for value, figures in parts.items())])
    if len(made["by_turns"]) > 1:
        turns = [[n, str(f["trajectories"]), _number(f["accuracy"], 3)] for n, f in made["by_turns"].items()]
        tables.append([["turns", "trajectories", "right"], *turns])
    for title, name in (("the environment's", "env"), ("parts of the reward", "reward_parts")):
        if made[name]:
            tables.append([[title, "mean"], *([n, _number(v, 3)] for n, v in made[name].items())])
    parts = [part for table in tables for part in _split_columns(table)]
    return "\n".join("".join(f"| {' | '.join(row)} |\n" for row in _ruled(part)) for part in parts)


def _split_columns(table: list[list[str]]) -> list[list[list[str]]]:
    """Split a table that is wider than a terminal into several with the same first column."""
    first_width, *widths = _column_widths(table)
    line_width, cuts = first_width + len("|  |"), [1]
    for column, width in enumerate(widths, 1):
        line_width += width + len(" | ")
        if line_width > TERMINAL_WIDTH and column > cuts[-1]:
            line_width = first_width + len("|  |") + width + len(" | ")
            cuts.append(column)
    ends = [*cuts[1:], len(table[0])]
    return [[[row[0], *row[start:end]] for row in table] for start, end in zip(cuts, ends, strict=True)]


def _column_widths(table: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _ruled(table: list[list[str]]) -> list[list[str]]:
    """Columns of one width, numbers to the right, and Markdown's rule under the header."""
    widths = _column_widths(table)
    rows = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table]
    return [rows[0], ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])], *rows[1:]]


def _plus_minus(figure: Mapping[str, Any]) -> str:
    error = figure["standard_error"]
    return _number(figure["mean"], 3) + ("" if error is None else f" ± {error:.3f}")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
