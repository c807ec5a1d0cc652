"""The figures of an evaluation: pass@k with standard errors, overall, by columns of the rows and by
number of turns.

Samples of one problem are not independent, problems are. So every mean is a mean over problems of
each problem's mean over its samples, and its standard error is s / √N over problems (Miller 2024,
"Adding Error Bars to Evals", section 2.2, clusters of one size). In pass@k a trajectory with an
error is a wrong answer: without it, the problems that survive would be favoured. The other means
leave it out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlinf_vl.observe.metrics import env_metrics, part_metrics
from rlinf_vl.observe.seeing import Shares, mean_and_error, seen_share
from rlinf_vl.types import GroupSummary, TrajectorySummary

#: Columns of a terminal; a table that is wider would be broken inside its lines.
TERMINAL_WIDTH = 80


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that one of k samples is right.

    The estimate is unbiased, from `correct` right ones of n ≥ k samples: 1 − C(n − c, k) / C(n, k)
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluation(
    summaries: Sequence[GroupSummary], samples: int, columns: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Return the figures of one group per problem, in the form of `eval.json`.

    Args:
        samples: trajectories of each group.
        columns: by name, a value for each group; each column becomes a table.
    """
    result = _figures(summaries, samples)
    result["by_turns"] = _by_turns(summaries)
    result["env"] = {
        name.removeprefix("env/"): value for name, value in env_metrics(summaries).items()
    }
    result["reward_parts"] = {
        name.removeprefix("reward/"): value for name, value in part_metrics(summaries).items()
    }
    result["tables"] = {}
    for name, values in columns.items():
        parts: dict[str, list[GroupSummary]] = {}
        for summary, value in zip(summaries, values, strict=True):
            parts.setdefault("–" if value is None else str(value), []).append(summary)
        table = {
            value: _figures(part, samples) for value, part in sorted(parts.items(), key=_natural)
        }
        result["tables"][name] = table
    return result


def control_figures(true: Shares, by_control: Mapping[str, Shares]) -> dict[str, Any]:
    """Return the accuracy of the questions with images as they are and under each control, and
    with `blank` the part that is seen; each as `mean_and_error`."""
    true_shares = {row: true[row] for shares in by_control.values() for row in shares}
    figures = {"as it is": mean_and_error(list(true_shares.values()))}
    for kind, shares in by_control.items():
        figures[kind] = mean_and_error(list(shares.values()))
    if blank := by_control.get("blank"):
        figures["seen"] = seen_share(true, blank)
    return figures


def _by_turns(summaries: Sequence[GroupSummary]) -> dict[str, dict[str, float]]:
    """Return the number of trajectories and their accuracy by number of turns."""
    correct_by_turns: dict[int, list[bool]] = {}
    for summary in summaries:
        for trajectory in summary.valid:
            correct_by_turns.setdefault(trajectory.turns, []).append(trajectory.correct)
    return {
        str(turns): {"trajectories": len(correct), "accuracy": sum(correct) / len(correct)}
        for turns, correct in sorted(correct_by_turns.items())
    }


def _natural(item: tuple[str, Any]) -> tuple[bool, float, str]:
    """Sort numbers by size, before names."""
    try:
        return False, float(item[0]), item[0]
    except ValueError:
        return True, 0.0, item[0]


def _figures(summaries: Sequence[GroupSummary], samples: int) -> dict[str, Any]:
    """Return the figures of all groups in one table cell: of a column's value, or of the whole
    evaluation."""
    valid: list[TrajectorySummary] = []  # the trajectories without an error
    rewards: list[float] = []  # mean of each problem that has a valid trajectory
    # Trajectories of each problem, and right ones among them.
    correct_counts: list[tuple[int, int]] = []
    errors: Counter[str] = Counter()
    for summary in summaries:
        valid_here = summary.valid
        valid += valid_here
        if valid_here:
            rewards.append(float(np.mean([t.reward for t in valid_here])))
        # a trajectory with an error stays in the total: it counts as wrong
        correct_counts.append((len(summary.trajectories), sum(t.correct for t in valid_here)))
        errors.update(
            t.error.partition(": ")[0] for t in summary.trajectories if t.error is not None
        )
    # powers of two, and the number of samples itself
    ks = sorted({2**e for e in range(samples.bit_length()) if 2**e <= samples} | {samples})
    figures: dict[str, Any] = {}
    for k in ks:
        figures[f"pass@{k}"] = mean_and_error(
            [pass_at_k(n, c, k) for n, c in correct_counts if n >= k]
        )
    return figures | {
        "reward": mean_and_error(rewards),
        "turns": {
            "mean": _mean(t.turns for t in valid),
            "max": max((t.turns for t in valid), default=0),
        },
        "response_tokens": _mean(t.response_tokens for t in valid),
        "truncated": _mean(t.status == "length" for t in valid),
        "trajectories": len(valid),
        "errors": dict(errors),
        "ungradable": sum(t.ungradable for s in summaries for t in s.trajectories),
    }


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def render(evaluated: Mapping[str, Any]) -> str:
    """Return the figures of `evaluation` as Markdown tables that fit a terminal of
    `TERMINAL_WIDTH`."""
    passes = [name for name in evaluated if name.startswith("pass@")]
    header = ["", "problems", *passes, "reward", "turns", "tokens", "errors"]

    def line(name: str, figures: Mapping[str, Any]) -> list[str]:
        counts = [
            str(figures["pass@1"]["problems"]),
            *(_plus_minus(figures[p]) for p in (*passes, "reward")),
        ]
        means = [_number(figures["turns"]["mean"], 1), _number(figures["response_tokens"], 0)]
        return [name, *counts, *means, str(sum(figures["errors"].values()))]

    tables = [[header, line("all", evaluated)]]
    for name, parts in evaluated["tables"].items():
        tables.append(
            [[name, *header[1:]], *(line(value, figures) for value, figures in parts.items())]
        )
    if len(evaluated["by_turns"]) > 1:
        turns = [
            [n, str(f["trajectories"]), _number(f["accuracy"], 3)]
            for n, f in evaluated["by_turns"].items()
        ]
        tables.append([["turns", "trajectories", "right"], *turns])
    if controls := evaluated.get("vision_controls"):
        rows = [[kind, str(f["problems"]), _plus_minus(f)] for kind, f in controls.items()]
        tables.append([["vision control", "problems", "right"], *rows])
    for title, name in (("the environment's", "env"), ("parts of the reward", "reward_parts")):
        if evaluated[name]:
            tables.append(
                [[title, "mean"], *([n, _number(v, 3)] for n, v in evaluated[name].items())]
            )
    blocks = []
    for table in tables:
        for part in _split_columns(table):
            blocks.append("".join(f"| {' | '.join(row)} |\n" for row in _ruled(part)))
    return "\n".join(blocks)


def _split_columns(table: list[list[str]]) -> list[list[list[str]]]:
    """Split a table that is wider than a terminal into several with the same first column."""
    first_width, *widths = _column_widths(table)
    line_width = first_width + len("|  |")
    cuts = [1]  # first column of each table, the repeated one aside
    for column, width in enumerate(widths, 1):
        line_width += width + len(" | ")
        if line_width > TERMINAL_WIDTH and column > cuts[-1]:
            line_width = first_width + len("|  |") + width + len(" | ")
            cuts.append(column)
    ends = [*cuts[1:], len(table[0])]
    tables = []
    for start, end in zip(cuts, ends, strict=True):
        tables.append([[row[0], *row[start:end]] for row in table])
    return tables


def _column_widths(table: list[list[str]]) -> list[int]:
    """Return the characters of each column's widest cell."""
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _ruled(table: list[list[str]]) -> list[list[str]]:
    """Pad columns to one width, numbers to the right, and add Markdown's rule under the header."""
    widths = _column_widths(table)
    rows = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table]
    return [
        rows[0],
        ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])],
        *rows[1:],
    ]


def _plus_minus(figure: Mapping[str, Any]) -> str:
    error = figure["standard_error"]
    return _number(figure["mean"], 3) + ("" if error is None else f" ± {error:.3f}")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
