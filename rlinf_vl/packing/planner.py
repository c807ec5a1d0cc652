"""Assignment of trajectories to ranks and micro-batches.

The plan is a pure function of lengths and costs, equal on every machine.

Invariants:

- Every trajectory is in exactly one micro-batch.
- No micro-batch exceeds the token budget.
- All ranks have the same number of micro-batches, so their collectives match.

A micro-batch holds a group's prompt once, however many of the group's trajectories it has. Groups
therefore stay whole where possible; a group that is split repeats its prompt.

Algorithm: whole groups, the most expensive first, are added to the cheapest micro-batch with enough
room; a group that fits nowhere is halved. Ranks wait for each other in every step, so micro-batches
of similar cost share a step.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter

import numpy as np

from rlinf_vl.types import Prices

#: Up to this many groups, several plans are compared. Some cut groups, since a few whole groups may
#: load the ranks unevenly.
FEW_GROUPS = 100


@dataclass(frozen=True, slots=True)
class Item:
    """The lengths of one trajectory."""

    group: int
    index: int  # of the trajectory in its group
    prompt: int  # tokens of the prompt, which the whole group shares
    tokens: int  # tokens after the prompt
    loss_tokens: int = 0  # those of `tokens` that carry loss: the head runs on them
    patches: int = 0  # vision patches of the group's images


@dataclass(frozen=True, slots=True)
class Plan:
    """The micro-batches of each rank.

    Attributes:
        micro_batches: `micro_batches[rank][step]` is a tuple of items, sorted by group and index.
        run_vision: for each step, whether any rank has images in it.
        fill: share of the budget of all micro-batches that tokens use, repeated prompts included
            (1 = full).
        imbalance: time lost by waiting, relative to balanced ranks: the sum over steps of the
            highest cost of a rank, divided by the sum over steps of the mean cost, minus 1.
        repeated: share of all tokens that are the second, third … copy of a prompt.
    """

    micro_batches: tuple[tuple[tuple[Item, ...], ...], ...]
    run_vision: tuple[bool, ...]
    fill: float
    imbalance: float
    repeated: float

    @property
    def steps(self) -> int:
        return len(self.run_vision)


def plan_micro_batches(
    items: Sequence[Item],
    *,
    ranks: int,
    budget: int,
    size: int | None = None,
    share_prompts: bool = True,
    prices: Prices = Prices(),  # noqa: B008 (frozen)
) -> Plan:
    """Distribute trajectories over ranks and as few micro-batches as the budget allows.

    Args:
        items: the trajectories of one mini-batch, in any order.
        ranks: data-parallel world size.
        budget: the maximum number of tokens in a micro-batch.
        size: the maximum number of trajectories in a micro-batch; None limits tokens only.
        share_prompts: whether a micro-batch holds a group's prompt once, or once per trajectory.
        prices: the training costs by which micro-batches are balanced.

    Raises:
        ValueError: a single item exceeds the budget.
    """
    longest = max((item.prompt + item.tokens for item in items), default=0)
    if longest > budget:
        raise ValueError(
            f"runner.max_tokens_per_mbs: a trajectory of {longest} tokens exceeds the budget of "
            f"{budget}"
        )
    if not items:
        return Plan((((),),) * ranks, (False,), 0.0, 0.0, 0.0)
    sizes = _Sizes(items, share_prompts, prices)
    bins, count = _best_bins(sizes, ranks, budget, size or len(items))
    per_rank, costs = _assign_to_ranks(sizes, bins, count, ranks)
    tokens = float(sizes.sums(sizes.tokens, sizes.once_tokens, bins, count).sum())
    distinct = sum({item.group: item.prompt for item in items}.values()) + sum(
        item.tokens for item in items
    )
    # A rank without images runs the vision tower, too, if another rank of its step has some.
    run_vision = []
    for step in range(len(per_rank[0])):
        run_vision.append(any(item.patches for rank in per_rank for item in rank[step]))
    return Plan(
        micro_batches=per_rank,
        run_vision=tuple(run_vision),
        fill=tokens / (costs.size * budget),
        imbalance=float(costs.max(axis=1).sum() / costs.mean(axis=1).sum() - 1)
        if costs.any()
        else 0.0,
        repeated=(tokens - distinct) / tokens,
    )


class _Sizes:
    """Tokens and cost of trajectories and groups, as arrays.

    The trajectories of group g are `start[g]` … `start[g + 1]` of `items`, `tokens` and `cost`. A
    micro-batch with at least one of them also takes `once_tokens[g]` and `once_cost[g]`: the prompt
    and the images. `bins` of the methods is the micro-batch of each trajectory, int64
    [trajectories].
    """

    def __init__(self, items: Sequence[Item], share_prompts: bool, prices: Prices) -> None:
        group, index, prompt, tokens, loss, patches = (
            np.fromiter(map(attrgetter(name), items), np.int64, len(items))
            for name in ("group", "index", "prompt", "tokens", "loss_tokens", "patches")
        )
        order = np.lexsort((index, group))
        self.items = [items[i] for i in order.tolist()]
        group, prompt, tokens, loss, patches = (
            column[order] for column in (group, prompt, tokens, loss, patches)
        )
        first = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
        self.start = np.append(first, len(items))
        self.group = np.repeat(np.arange(len(first)), np.diff(self.start))
        self.once_tokens = prompt[first]
        if not np.array_equal(self.once_tokens[self.group], prompt):
            raise ValueError("the trajectories of a group have prompts of different lengths")
        # Causal attention: a prompt of p tokens has about p² / 2 pairs; n tokens behind it have n ·
        # p pairs with the prompt and n² / 2 among themselves.
        self.once_cost = self.once_tokens + prices.attention * self.once_tokens**2 / 2
        self.tokens = tokens
        self.cost = tokens + prices.attention * tokens * (prompt + tokens / 2) + prices.head * loss
        if not share_prompts:
            self.tokens, self.cost = self.tokens + prompt, self.cost + self.once_cost[self.group]
            self.once_tokens, self.once_cost = 0 * self.once_tokens, 0 * self.once_cost
        # With and without shared prompts, a micro-batch encodes each image once.
        self.once_cost = self.once_cost + prices.patch * patches[first]

    def sums(
        self, per_trajectory: np.ndarray, per_group: np.ndarray, bins: np.ndarray, count: int
    ) -> np.ndarray:
        """Return the sum of each micro-batch, float64 [count].

        `per_trajectory` counts for each of its trajectories, `per_group` once for each group with a
        trajectory in it.
        """
        # One number for each pair of micro-batch and group, so that `unique` counts a pair once.
        pair_bins, pair_groups = np.divmod(
            np.unique(bins * len(per_group) + self.group), len(per_group)
        )
        return np.bincount(bins, per_trajectory, count) + np.bincount(
            pair_bins, per_group[pair_groups], count
        )

    def costs(self, bins: np.ndarray, count: int) -> np.ndarray:
        return self.sums(self.cost, self.once_cost, bins, count)


def _best_bins(sizes: _Sizes, ranks: int, budget: int, size: int) -> tuple[np.ndarray, int]:
    """Fill as few micro-batches as possible, their number a multiple of `ranks`.

    Up to `FEW_GROUPS` groups, return the fastest of the fillings that succeed with that number.
    With more groups, return the first one that succeeds; the search then starts with 2 % more
    micro-batches, so that it succeeds soon.

    Returns:
        The micro-batch of each trajectory (`bins`), and the number of micro-batches.
    """
    n, groups = len(sizes.items), len(sizes.once_tokens)
    tokens = int(sizes.tokens.sum() + sizes.once_tokens.sum())
    count = max(math.ceil(tokens / budget), math.ceil(n / size))
    if groups > FEW_GROUPS:
        strategies = [("roomiest", 1, 0), ("tightest", 1, 0)]
        count += count // 50
    else:
        cuts = [("cheapest", pieces, cut) for pieces in (2, 4, 8) for cut in (ranks, groups)]
        strategies = [("cheapest", 1, 0), ("tightest", 1, 0), *cuts]
    while True:
        count = math.ceil(count / ranks) * ranks
        candidates = []
        for choice, pieces, n_cut in strategies:
            bins = _fill(sizes, count, budget, size, choice, pieces, n_cut)
            if bins is not None:
                candidates.append(bins)
                if groups > FEW_GROUPS:
                    break
        if candidates:
            # Micro-batches of similar cost share a step, which lasts as long as its slowest rank.
            fastest = min(
                candidates,
                key=lambda bins: np.sort(sizes.costs(bins, count)).reshape(-1, ranks)[:, -1].sum(),
            )
            return fastest, count
        count += 1 + count // 100


def _fill(
    sizes: _Sizes, count: int, budget: int, size: int, choice: str, pieces: int, n_cut: int
) -> np.ndarray | None:
    """Add whole groups, the most expensive first, to one of `count` micro-batches with enough room.

    A group that fits nowhere is halved.

    Args:
        choice: which micro-batch with enough room takes a group: the "cheapest" so far, the
            "roomiest" or the "tightest".
        pieces, n_cut: the `n_cut` cheapest groups are cut into `pieces` beforehand.

    Returns:
        The micro-batch of each trajectory, or None if a single trajectory fits nowhere.
    """
    # Sums up to each trajectory: the cost of trajectories a … b is cost[b] - cost[a]. Lists, since
    # the loop below reads single numbers.
    cost, tokens = (np.append(0, np.cumsum(x)).tolist() for x in (sizes.cost, sizes.tokens))
    once_cost, once_tokens, group = (
        x.tolist() for x in (sizes.once_cost, sizes.once_tokens, sizes.group)
    )

    def heap_entry(first: int, end: int) -> tuple[float, int, int]:
        """Return (negative cost, first, end): the heap's least entry is the most expensive."""
        return cost[first] - cost[end] - once_cost[group[first]], first, end

    heap = sorted(map(heap_entry, sizes.start[:-1].tolist(), sizes.start[1:].tolist()))
    for _, start, end in [heap.pop() for _ in range(min(n_cut, len(heap)))]:
        cuts = sorted({start + (end - start) * k // pieces for k in range(pieces + 1)})
        heap += map(heap_entry, cuts[:-1], cuts[1:])
    heapify(heap)
    bins = np.zeros(len(sizes.items), np.int64)
    load, free_tokens, free_slots = [0.0] * count, [budget] * count, [size] * count
    # Sorted by free tokens, so that bisection finds the micro-batches with enough room.
    by_free_tokens = [(budget, b) for b in range(count)]
    while heap:
        negative_cost, first, end = heappop(heap)
        needed = once_tokens[group[first]] + tokens[end] - tokens[first]
        roomy = range(bisect_left(by_free_tokens, (needed, -1)), count)[
            :: 1 if choice == "tightest" else -1
        ]
        targets = (b for i in roomy if free_slots[b := by_free_tokens[i][1]] >= end - first)
        target = (
            min(targets, key=load.__getitem__, default=None)
            if choice == "cheapest"
            else next(targets, None)
        )
        if target is not None:
            del by_free_tokens[bisect_left(by_free_tokens, (free_tokens[target], target))]
            free_tokens[target] -= needed
            insort(by_free_tokens, (free_tokens[target], target))
            load[target] -= negative_cost
            free_slots[target] -= end - first
            bins[first:end] = target
        elif end - first == 1:
            return None
        else:
            heappush(heap, heap_entry(first, (first + end) // 2))
            heappush(heap, heap_entry((first + end) // 2, end))
    return bins


def _assign_to_ranks(
    sizes: _Sizes, bins: np.ndarray, count: int, ranks: int
) -> tuple[tuple[tuple[tuple[Item, ...], ...], ...], np.ndarray]:
    """Assign micro-batches to ranks and steps.

    Micro-batches of similar cost share a step, the most expensive first. Within a step, the rank
    with the lowest total cost so far gets the most expensive one.

    Returns:
        The micro-batches of each rank, and their costs, float64 [steps, ranks]; the columns of the
        costs are sorted by cost, not by rank.
    """
    costs = sizes.costs(bins, count)
    members: list[list[Item]] = [[] for _ in range(count)]
    for item, b in zip(sizes.items, bins.tolist(), strict=True):
        members[b].append(item)
    order = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    per_rank: list[list[tuple[Item, ...]]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for step in order:
        ranks_by_load = np.argsort(load, kind="stable")
        load[ranks_by_load] += costs[step]
        for rank, b in zip(ranks_by_load.tolist(), step.tolist(), strict=True):
            per_rank[rank].append(tuple(members[b]))
    return tuple(map(tuple, per_rank)), costs[order]
