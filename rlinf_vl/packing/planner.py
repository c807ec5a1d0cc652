"""Who trains what, in which micro-batch: a pure function of lengths and costs, the same on every machine.

Invariants: every trajectory is in exactly one micro-batch; no micro-batch exceeds the token budget (it is hard); all ranks
have the same number of micro-batches, so their collectives match.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens after which attention's quadratic part costs as much as the rest of a layer: about 6 × the hidden size for usual
#: shapes; only the balance depends on it, never the budget.
ATTENTION_KNEE = 8192

#: Cost of a vision patch in text tokens (a tower is smaller than its language model, and needs no backward when frozen).
PATCH_COST = 0.1


@dataclass(frozen=True, slots=True)
class Item:
    """One trajectory: its group and place in it, its tokens, and the vision patches it brings."""

    group: int
    index: int
    tokens: int
    patches: int = 0

    @property
    def cost(self) -> float:
        """Work in units of text tokens: linear part, attention's quadratic part, vision patches."""
        return self.tokens * (1 + self.tokens / ATTENTION_KNEE) + PATCH_COST * self.patches


@dataclass(frozen=True, slots=True)
class Plan:
    """`micro_batches[rank][step]` is a tuple of items; `run_vision[step]` says if any rank has images in that step."""

    micro_batches: tuple[tuple[tuple[Item, ...], ...], ...]
    run_vision: tuple[bool, ...]
    fill: float
    imbalance: float

    @property
    def steps(self) -> int:
        return len(self.run_vision)


def plan_micro_batches(items: Sequence[Item], *, ranks: int, budget: int, size: int | None = None) -> Plan:
    """Distribute trajectories over ranks and micro-batches.

    Args:
        items: the trajectories of one mini-batch.
        ranks: data-parallel world size.
        budget: most tokens in a micro-batch.
        size: trajectories per micro-batch; None packs by tokens alone.

    Returns:
        A `Plan`. `fill` is the share of all micro-batches' budget that holds tokens (1 = full), `imbalance` the most
        loaded rank's cost over the mean, minus 1.

    Raises:
        ValueError: an item alone exceeds the budget.
    """
    longest = max((item.tokens for item in items), default=0)
    if longest > budget:
        raise ValueError(f"runner.max_tokens_per_mbs: a trajectory of {longest} tokens exceeds the budget of {budget}")
    count = _fewest_bins(items, budget, size)
    count = max(1, math.ceil(count / ranks)) * ranks
    bins = _balanced(items, count, budget, size)
    while bins is None:  # a tight budget can defeat balancing; with one more bin per rank it is less tight
        count += ranks
        bins = _balanced(items, count, budget, size)
    per_rank = _deal(bins, ranks)
    steps = count // ranks
    run_vision = tuple(any(item.patches for rank in per_rank for item in rank[step]) for step in range(steps))
    costs = [sum(item.cost for bin_ in rank for item in bin_) for rank in per_rank]
    mean = sum(costs) / ranks
    return Plan(
        micro_batches=per_rank,
        run_vision=run_vision,
        fill=sum(item.tokens for item in items) / (count * budget),
        imbalance=max(costs) / mean - 1 if mean else 0.0,
    )


def _fewest_bins(items: Sequence[Item], budget: int, size: int | None) -> int:
    if size is not None:
        return math.ceil(len(items) / size)
    return math.ceil(sum(item.tokens for item in items) / budget)


def _balanced(items: Sequence[Item], count: int, budget: int, size: int | None) -> list[list[Item]] | None:
    """Longest-processing-time first into the cheapest bin that has room; None if some item finds none."""
    bins: list[list[Item]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, b) for b in range(count)]
    for item in sorted(items, key=lambda item: (-item.cost, item.group, item.index)):
        full = []
        while heap:
            cost, b = heapq.heappop(heap)
            if tokens[b] + item.tokens <= budget and (size is None or len(bins[b]) < size):
                bins[b].append(item)
                tokens[b] += item.tokens
                heapq.heappush(heap, (cost + item.cost, b))
                break
            full.append((cost, b))
        else:
            return None
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _deal(bins: list[list[Item]], ranks: int) -> tuple[tuple[tuple[Item, ...], ...], ...]:
    """Give bins to ranks, dearest first, each to the least loaded rank that still has a free step; groups stay in order."""
    steps = len(bins) // ranks
    per_rank: list[list[tuple[Item, ...]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    ordered = sorted(bins, key=lambda b: -sum(item.cost for item in b))
    for bin_ in ordered:
        rank = min((r for r in range(ranks) if len(per_rank[r]) < steps), key=lambda r: load[r])
        per_rank[rank].append(tuple(sorted(bin_, key=lambda item: (item.group, item.index))))
        load[rank] += sum(item.cost for item in bin_)
    return tuple(tuple(rank) for rank in per_rank)
