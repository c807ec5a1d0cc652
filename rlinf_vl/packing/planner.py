"""Who trains what, in which micro-batch: a pure function of lengths and prices, the same on every machine.

Invariants: every trajectory is in exactly one micro-batch; no micro-batch exceeds the token budget (it is hard); all ranks
have the same number of micro-batches, so their collectives match. A micro-batch has a group's prompt once, however many of its
trajectories it has, so groups stay whole where they can; one that is split brings its prompt again.

Whole groups go, the dearest first, to the cheapest micro-batch that has room; a group that fits nowhere is halved. Ranks wait
for each other in every step, so micro-batches of like cost share a step.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter

import numpy as np

from rlinf_vl.types import Prices

#: Up to this many groups, several plans are compared, some of groups that are cut: whole ones may leave ranks uneven.
FEW_GROUPS = 100


@dataclass(frozen=True, slots=True)
class Item:
    """One trajectory: its `group` and `index` in it; lengths are in tokens.

    `prompt` is shared with the group, `tokens` come after it, the head runs on `loss_tokens` of them, and `patches` are
    the vision patches of the group's images.
    """

    group: int
    index: int
    prompt: int
    tokens: int
    loss_tokens: int = 0
    patches: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """`micro_batches[rank][step]` is a tuple of items by group and index; `run_vision[step]` says if any rank has images then.

    Attributes:
        fill: share of all micro-batches' budget that holds tokens, repeated prompts included (1 = full).
        imbalance: time lost by waiting: Σ over steps of the dearest rank's cost, over that of the mean, minus 1.
        repeated: share of all tokens that are a prompt's second, third … copy.
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
    """Distribute trajectories over ranks and micro-batches, as few as the budget allows.

    Args:
        items: the trajectories of one mini-batch, in any order.
        ranks: data-parallel world size.
        budget: most tokens in a micro-batch.
        size: most trajectories per micro-batch; None packs by tokens alone.
        share_prompts: whether a micro-batch holds a group's prompt once, or once per trajectory.

    Raises:
        ValueError: an item alone exceeds the budget.
    """
    longest = max((item.prompt + item.tokens for item in items), default=0)
    if longest > budget:
        raise ValueError(f"runner.max_tokens_per_mbs: a trajectory of {longest} tokens exceeds the budget of {budget}")
    if not items:
        return Plan((((),),) * ranks, (False,), 0.0, 0.0, 0.0)
    sizes = _Sizes(items, share_prompts, prices)
    bins, count = _best_bins(sizes, ranks, budget, size or len(items))
    per_rank, costs = _deal(sizes, bins, count, ranks)
    tokens = float(sizes.sums(sizes.tokens, sizes.once_tokens, bins, count).sum())
    distinct = sum({item.group: item.prompt for item in items}.values()) + sum(item.tokens for item in items)
    return Plan(
        micro_batches=per_rank,
        run_vision=tuple(any(i.patches for micro in step for i in micro) for step in zip(*per_rank, strict=True)),
        fill=tokens / (costs.size * budget),
        imbalance=float(costs.max(axis=1).sum() / costs.mean(axis=1).sum() - 1) if costs.any() else 0.0,
        repeated=(tokens - distinct) / tokens,
    )


class _Sizes:
    """What trajectories and groups take. Group g's trajectories are `start[g]` … `start[g + 1]` of `items`, `tokens` and `cost`;
    `once_tokens[g]` and `once_cost[g]` are taken in every micro-batch that has one of them. `bins` assign each trajectory to a
    micro-batch: int [trajectories]."""

    def __init__(self, items: Sequence[Item], share_prompts: bool, prices: Prices) -> None:
        group, index, prompt, tokens, loss, patches = (
            np.fromiter(map(attrgetter(name), items), np.int64, len(items))
            for name in ("group", "index", "prompt", "tokens", "loss_tokens", "patches")
        )
        order = np.lexsort((index, group))
        self.items = [items[i] for i in order.tolist()]
        group, prompt, tokens, loss, patches = (column[order] for column in (group, prompt, tokens, loss, patches))
        first = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
        self.start = np.append(first, len(items))
        self.group = np.repeat(np.arange(len(first)), np.diff(self.start))
        self.once_tokens = prompt[first]
        if not np.array_equal(self.once_tokens[self.group], prompt):
            raise ValueError("the trajectories of a group have prompts of different lengths")
        self.once_cost = self.once_tokens + prices.attention * self.once_tokens**2 / 2
        self.tokens = tokens
        self.cost = tokens + prices.attention * tokens * (prompt + tokens / 2) + prices.head * loss
        if not share_prompts:
            self.tokens, self.cost = self.tokens + prompt, self.cost + self.once_cost[self.group]
            self.once_tokens, self.once_cost = 0 * self.once_tokens, 0 * self.once_cost
        self.once_cost = self.once_cost + prices.patch * patches[first]  # an image is in a micro-batch once, either way

    def sums(self, each: np.ndarray, once: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
        """float64 [count]: of each micro-batch, `each` of its trajectories and `once` for every group that it has."""
        which, group = np.divmod(np.unique(bins * len(once) + self.group), len(once))
        return np.bincount(bins, each, count) + np.bincount(which, once[group], count)

    def costs(self, bins: np.ndarray, count: int) -> np.ndarray:
        return self.sums(self.cost, self.once_cost, bins, count)


def _best_bins(sizes: _Sizes, ranks: int, budget: int, size: int) -> tuple[np.ndarray, int]:
    """The fastest of several ways to fill the least multiple of `ranks` micro-batches that one of them achieves: (bins, how many
    micro-batches).

    With many groups, the first way that succeeds will do, and there are 2 % more micro-batches so that one soon does.
    """
    n, groups = len(sizes.items), len(sizes.once_tokens)
    tokens = int(sizes.tokens.sum() + sizes.once_tokens.sum())
    count = max(math.ceil(tokens / budget), math.ceil(n / size))
    if groups > FEW_GROUPS:
        ways = [("roomiest", 1, 0), ("tightest", 1, 0)]
        count += count // 50
    else:
        cuts = [("cheapest", pieces, cut) for pieces in (2, 4, 8) for cut in (ranks, groups)]
        ways = [("cheapest", 1, 0), ("tightest", 1, 0), *cuts]
    while True:
        count = math.ceil(count / ranks) * ranks
        filled = (_fill(sizes, count, budget, size, *way) for way in ways)
        found = list(islice((bins for bins in filled if bins is not None), 1 if groups > FEW_GROUPS else None))
        if found:
            return min(found, key=lambda bins: np.sort(sizes.costs(bins, count)).reshape(-1, ranks)[:, -1].sum()), count
        count += 1 + count // 100


def _fill(sizes: _Sizes, count: int, budget: int, size: int, choice: str, pieces: int, n_cut: int) -> np.ndarray | None:
    """Whole groups, the dearest first, each into one of `count` micro-batches that have room; one that fits nowhere is halved.
    None if a single trajectory fits nowhere.

    `choice` says which: the "cheapest" so far, the "roomiest" or the "tightest". The `n_cut` cheapest groups go in `pieces`.
    """
    cost, tokens = (np.append(0, np.cumsum(x)).tolist() for x in (sizes.cost, sizes.tokens))
    once_cost, once_tokens, group = (x.tolist() for x in (sizes.once_cost, sizes.once_tokens, sizes.group))

    def part(first: int, end: int) -> tuple[float, int, int]:
        return cost[first] - cost[end] - once_cost[group[first]], first, end  # a heap gives the least first

    parts = sorted(map(part, sizes.start[:-1].tolist(), sizes.start[1:].tolist()))
    for _, start, end in [parts.pop() for _ in range(min(n_cut, len(parts)))]:
        cuts = sorted({start + (end - start) * k // pieces for k in range(pieces + 1)})
        parts += map(part, cuts[:-1], cuts[1:])
    heapify(parts)
    bins = np.zeros(len(sizes.items), np.int64)
    load, room, places = [0.0] * count, [budget] * count, [size] * count
    by_room = [(budget, b) for b in range(count)]
    while parts:
        negative_cost, first, end = heappop(parts)
        needed = once_tokens[group[first]] + tokens[end] - tokens[first]
        fitting = range(bisect_left(by_room, (needed, -1)), count)[:: 1 if choice == "tightest" else -1]
        free = (b for i in fitting if places[b := by_room[i][1]] >= end - first)
        best = min(free, key=load.__getitem__, default=None) if choice == "cheapest" else next(free, None)
        if best is not None:
            del by_room[bisect_left(by_room, (room[best], best))]
            room[best] -= needed
            insort(by_room, (room[best], best))
            load[best] -= negative_cost
            places[best] -= end - first
            bins[first:end] = best
        elif end - first == 1:
            return None
        else:
            heappush(parts, part(first, (first + end) // 2))
            heappush(parts, part((first + end) // 2, end))
    return bins


def _deal(
    sizes: _Sizes, bins: np.ndarray, count: int, ranks: int
) -> tuple[tuple[tuple[tuple[Item, ...], ...], ...], np.ndarray]:
    """Micro-batches of each rank, and their costs [steps, ranks] in no order of ranks.

    Micro-batches of like cost share a step, the dearest first; in each, the rank with the least so far gets the dearest.
    """
    costs = sizes.costs(bins, count)
    members: list[list[Item]] = [[] for _ in range(count)]
    for item, b in zip(sizes.items, bins.tolist(), strict=True):
        members[b].append(item)
    order = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    per_rank: list[list[tuple[Item, ...]]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for step in order:
        behind = np.argsort(load, kind="stable")
        load[behind] += costs[step]
        for rank, b in zip(behind.tolist(), step.tolist(), strict=True):
            per_rank[rank].append(tuple(members[b]))
    return tuple(map(tuple, per_rank)), costs[order]
