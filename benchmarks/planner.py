"""Planning micro-batches: seconds, fill, waiting and repeated prompts, from 10³ to 10⁶ trajectories.

    python benchmarks/planner.py [--ranks 8] [--budget 16384] [--largest 1000000] [--repeats 3] [--json FILE] [--against FILE]

Lengths are those of geometry problems: prompts of 150–500 tokens, groups of 8 responses with a long tail, 20–300 tokens. The
baseline is in the same run: the longest trajectory first, to the emptiest micro-batch (a heap), each with its own prompt,
whose copies its fill and its time count. `time` is Σ over steps of the dearest rank's cost, of the micro-batches as planned.

Steps of 16 to 300 groups on 2 to 8 ranks are planned as well (`case_*`: their time); `--against` names the `--json` of
another version, to whose times these are compared.
"""

import argparse
import heapq
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rlinf_vl.packing.planner import Item, plan_micro_batches
from rlinf_vl.types import Prices

SAMPLES = 8
PRICES = Prices()


def make_items(n: int, seed: int = 0) -> list[Item]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(150, 501, math.ceil(n / SAMPLES)).tolist()
    lengths = np.clip(rng.lognormal(4.5, 0.7, n), 20, 300).astype(int).tolist()
    return [
        Item(
            k // SAMPLES,
            k % SAMPLES,
            prompts[k // SAMPLES],
            tokens,
            tokens,
            2 * prompts[k // SAMPLES],
        )
        for k, tokens in enumerate(lengths)
    ]


def cases() -> dict[str, float]:
    """Time of 18 plans of a step, each the mean over three draws."""
    figures = {}
    for groups, budget, ranks in product((16, 64, 300), (4096, 16384), (2, 4, 8)):
        times = []
        for seed in range(3):
            plan = plan_micro_batches(
                make_items(groups * SAMPLES, seed), ranks=ranks, budget=budget
            )
            steps = [list(step) for step in zip(*plan.micro_batches, strict=True)]
            times.append(measure(steps, budget, share=True)["time"])
        figures[f"case_{groups}_groups_{budget}_tokens_{ranks}_ranks"] = statistics.mean(times)
    return figures


def greedy(items: list[Item], ranks: int, budget: int) -> list[list[list[Item]]]:
    """[step][rank]: the longest trajectory first, into the emptiest micro-batch; more of those until all have room."""
    work = sorted(((item.prompt + item.tokens, k) for k, item in enumerate(items)), reverse=True)
    count = math.ceil(sum(tokens for tokens, _ in work) / budget / ranks) * ranks
    while True:
        bins: list[list[Item]] = [[] for _ in range(count)]
        heap = [(0, b) for b in range(count)]
        for tokens, k in work:
            held, b = heap[0]
            if held + tokens > budget:
                break
            bins[b].append(items[k])
            heapq.heapreplace(heap, (held + tokens, b))
        else:
            bins.sort(key=lambda micro: -sum(item.prompt + item.tokens for item in micro))
            return [bins[k : k + ranks] for k in range(0, count, ranks)]
        count += max(1, count // 200 // ranks) * ranks


def _cost(micro: list[Item], share: bool = False) -> float:
    """Cost of a micro-batch: each group's prompt and images once, or (not `share`) each trajectory's prompt again."""
    cost, seen = 0.0, set()
    for item in micro:
        p, n = item.prompt, item.tokens
        cost += n + PRICES.attention * (n * p + n * n / 2) + PRICES.head * item.loss_tokens
        if item.group not in seen:
            cost += PRICES.patch * item.patches
        if item.group not in seen or not share:
            cost += p + PRICES.attention * p * p / 2
        seen.add(item.group)
    return cost


def measure(steps: list[list[list[Item]]], budget: int, share: bool) -> dict[str, float]:
    """Figures of a plan [step][rank], counted the same way for everybody."""
    costs = [[_cost(micro, share) for micro in step] for step in steps]
    micro = [m for step in steps for m in step]
    once = [{item.group: item.prompt for item in m} for m in micro]
    prompts = (
        sum(sum(o.values()) for o in once) if share else sum(i.prompt for m in micro for i in m)
    )
    distinct = sum({g: p for o in once for g, p in o.items()}.values())
    tokens = prompts + sum(i.tokens for m in micro for i in m)
    longest = sum(max(step) for step in costs)
    return {
        "micro_batches": len(micro),
        "fill": tokens / (len(micro) * budget),
        "imbalance": longest * len(costs[0]) / sum(map(sum, costs)) - 1,
        "repeated": (prompts - distinct) / tokens,
        "time": longest,
    }


def timed(call: Callable[[], object], repeats: int) -> tuple[float, object]:
    """Median seconds of this process's CPU (other processes do not count), and what the last call returned."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument(
        "--largest", type=int, default=10**6, help="trajectories; from 1,000, by factors of ten"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of which the median is taken; once above 100,000"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--against", type=Path, help="figures of another version, written with --json"
    )
    args = parser.parse_args()
    table = Table(
        title=f"{args.ranks} ranks, {args.budget} tokens a row, groups of {SAMPLES}; time is over the greedy one's"
    )
    for column in ("items", "plan", "seconds", "rows", "fill", "waiting", "repeated", "time"):
        table.add_column(column)
    figures: dict[str, float | int | str] = {}
    n = 1000
    while n <= args.largest:
        items, repeats = make_items(n), args.repeats if n <= 100_000 else 1
        seconds, plan = timed(
            lambda: plan_micro_batches(items, ranks=args.ranks, budget=args.budget),  # noqa: B023
            repeats,
        )
        ours = measure(
            [list(step) for step in zip(*plan.micro_batches, strict=True)], args.budget, share=True
        )
        base_seconds, steps = timed(lambda: greedy(items, args.ranks, args.budget), repeats)  # noqa: B023
        base = measure(steps, args.budget, share=False)
        assert (
            abs(ours["imbalance"] - plan.imbalance) < 1e-6 and abs(ours["fill"] - plan.fill) < 1e-6
        )
        for name, spent, m in (("greedy", base_seconds, base), ("planner", seconds, ours)):
            row = [
                f"{spent:.3f}",
                str(m["micro_batches"]),
                f"{m['fill']:.3f}",
                f"{m['imbalance']:.2%}",
            ]
            table.add_row(
                f"{n:,}", name, *row, f"{m['repeated']:.1%}", f"{m['time'] / base['time']:.3f}"
            )
        figures |= {f"seconds_{n}": seconds} | {f"{key}_{n}": value for key, value in ours.items()}
        figures |= {f"greedy_seconds_{n}": base_seconds} | {
            f"greedy_{key}_{n}": value for key, value in base.items()
        }
        figures |= {
            f"seconds_ratio_{n}": seconds / base_seconds,
            f"time_ratio_{n}": ours["time"] / base["time"],
        }
        n *= 10
    steps_of_few_groups = cases()
    figures |= steps_of_few_groups
    ratios = []
    if args.against:
        theirs = json.loads(args.against.read_text())
        ratios = [value / theirs[name] for name, value in steps_of_few_groups.items()]
        figures |= {
            "cases_time_ratio_mean": statistics.mean(ratios),
            "cases_time_ratio_worst": max(ratios),
        }
    figures |= {
        "ranks": args.ranks,
        "budget": args.budget,
        "group_size": SAMPLES,
        "repeats": args.repeats,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
    }
    Console().print(table)
    if ratios:
        print(
            f"{len(ratios)} steps take {statistics.mean(ratios):.3f} of {args.against}'s time, {max(ratios):.3f} at worst"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
