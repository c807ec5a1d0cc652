"""Who trains what, in which micro-batch: a pure function of lengths and prices, the same on every machine.

Invariants: every trajectory is in exactly one micro-batch; no micro-batch exceeds the token budget (it is hard); all ranks
have the same number of micro-batches, so their collectives match. A group's prompt is in a micro-batch once, however many
of its trajectories are there, so groups stay whole where they can; one that is split brings its prompt again.

Ranks wait for each other in every micro-batch. So what counts is that those of one step cost the same, not all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from operator import attrgetter

import numpy as np

from rlinf_vl.packing.filling import Bin, Filling, Sizes, Way
from rlinf_vl.types import Prices

#: Share of a step's time that may be lost by waiting without groups being split against it.
TOLERANCE = 0.02
#: How much longer all may take, repeated prompts included, for ranks to be even; beyond that it is not worth it.
EVENNESS = 0.1
#: With more groups than these, one way of filling bins is tried and not all: in so many steps, what it leaves evens out.
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
    ordered, sizes = _sizes_of(items, share_prompts, prices)
    bins = _least_bins(sizes, ranks, budget, size or len(items))
    per_rank, costs = _deal(ordered, sizes, bins, ranks)
    vision = tuple(any(item.patches for micro in step for item in micro) for step in zip(*per_rank, strict=True))
    repeated = sum(item.prompt for item in items) - sum({item.group: item.prompt for item in items}.values())
    tokens = sum(item.prompt + item.tokens for item in items)
    if share_prompts:
        copies = sum(int(sizes.once_tokens[group]) for bin_ in bins for group, _ in bin_) - int(sizes.once_tokens.sum())
        repeated, tokens = copies, tokens - repeated + copies
    return Plan(
        micro_batches=per_rank,
        run_vision=vision,
        fill=tokens / (len(bins) * budget),
        imbalance=float(costs.max(axis=1).sum() / costs.mean(axis=1).sum() - 1) if costs.any() else 0.0,
        repeated=repeated / tokens,
    )


def _sizes_of(items: Sequence[Item], share_prompts: bool, prices: Prices) -> tuple[list[Item], Sizes]:
    """The items by group and index, and what they take."""

    def column(name: str) -> np.ndarray:
        return np.fromiter(map(attrgetter(name), items), np.int64, len(items))

    group, index = column("group"), column("index")
    order = np.lexsort((index, group))
    group = group[order]
    prompt, tokens, loss, patches = (column(name)[order] for name in ("prompt", "tokens", "loss_tokens", "patches"))
    start = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
    which = np.repeat(np.arange(len(start)), np.diff(start, append=len(items)))
    once_tokens = prompt[start]
    if not np.array_equal(once_tokens[which], prompt):
        raise ValueError("the trajectories of a group have prompts of different lengths")
    once_cost = once_tokens + prices.attention * once_tokens**2 / 2
    cost = tokens + prices.attention * tokens * (prompt + tokens / 2) + prices.head * loss
    if not share_prompts:
        tokens, cost = tokens + prompt, cost + once_cost[which]
        once_tokens, once_cost = 0 * once_tokens, 0 * once_cost
    once_cost = once_cost + prices.patch * patches[start]  # an image is in a micro-batch once, either way
    sizes = Sizes(np.append(start, len(items)), once_tokens, once_cost, tokens, cost)
    return [items[i] for i in order.tolist()], sizes


def _least_bins(sizes: Sizes, ranks: int, budget: int, size: int) -> list[Bin]:
    """The least multiple of `ranks` bins that a way of filling achieves, by the best of the ways that do."""
    n, groups = len(sizes.tokens), len(sizes.once_tokens)

    def filled(count: int, way: Way, reserve: float = 0.0) -> Filling:
        filling = Filling(sizes, budget, size, way)
        filling.run(count, reserve)
        return filling

    hard = ("tokens", "places") if size < n else ("tokens",)
    full = min((filled(0, Way(measure, 0.0, True, 0)) for measure in hard), key=lambda filling: len(filling.bins))
    most = _round_up(len(full.bins), ranks)
    least = max(math.ceil((sizes.once_tokens.sum() + sizes.tokens.sum()) / budget), math.ceil(n / size))
    few = groups <= FEW_GROUPS
    for count in range(_round_up(least, ranks) if few else most, most + 1, ranks):
        ways = [Way(measure, TOLERANCE, True, 2 * ranks) for measure in hard]
        if few:
            tails = (ranks, 3 * ranks)
            ways += [Way(*way) for way in product(hard, (0.0, TOLERANCE), (False, True), tails)]
            ways += [Way(*way, count) for way in product(("cost", *hard), (0.0, TOLERANCE, 1.0), (False, True))]
        found = [full.bins] if count == most else []
        for way in ways:
            reserve = full.repeated
            for _ in range(3 if few else 1):  # what the splits of one pass repeat, the next one sees coming
                filling = filled(count, way, reserve)
                if len(filling.bins) <= count:
                    found.append(filling.bins)
                if filling.repeated == reserve:
                    break
                reserve = filling.repeated
        if found:
            return _best([bins + [[]] * (count - len(bins)) for bins in found], sizes, ranks)
    raise AssertionError("a filling without a limit to its bins holds everything")


def _round_up(n: int, multiple: int) -> int:
    return max(1, math.ceil(n / multiple)) * multiple


def _best(found: list[list[Bin]], sizes: Sizes, ranks: int) -> list[Bin]:
    """Of those that take about the least time, the one that waits no more than the tolerance, or least; then the fastest."""
    steps = [np.sort(_costs(sizes, bins)).reshape(-1, ranks) for bins in found]
    times = [float(costs[:, -1].sum()) for costs in steps]
    waits = [time * ranks - float(costs.sum()) for time, costs in zip(times, steps, strict=True)]
    waits = [max(TOLERANCE, wait / float(costs.sum() or 1)) for wait, costs in zip(waits, steps, strict=True)]
    limit = (1 + EVENNESS) * min(times)
    return found[min((waits[i], times[i], i) for i in range(len(found)) if times[i] <= limit)[-1]]


def _costs(sizes: Sizes, bins: Sequence[Bin]) -> np.ndarray:
    """float64 [bins]."""
    which, groups, lengths = np.array([(b, g, len(places)) for b, bin_ in enumerate(bins) for g, places in bin_]).T
    places = np.fromiter(chain.from_iterable(p for bin_ in bins for _, p in bin_), np.int64, len(sizes.tokens))
    costs = np.bincount(which, sizes.once_cost[groups], len(bins))
    return costs + np.bincount(np.repeat(which, lengths), sizes.cost[places], len(bins))


def _deal(
    items: Sequence[Item], sizes: Sizes, bins: Sequence[Bin], ranks: int
) -> tuple[tuple[tuple[tuple[Item, ...], ...], ...], np.ndarray]:
    """Micro-batches of each rank, and their costs [steps, ranks] in no order of ranks.

    Bins of like cost share a step, dearest first; in each, the rank with the least so far gets the dearest.
    """
    costs = _costs(sizes, bins)
    order = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    per_rank: list[list[tuple[Item, ...]]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for step in order:
        behind = np.argsort(load, kind="stable")
        load[behind] += costs[step]
        for rank, b in zip(behind.tolist(), step.tolist(), strict=True):
            places = chain.from_iterable(p for _, p in sorted(bins[b], key=lambda part: part[0]))
            per_rank[rank].append(tuple([items[k] for k in places]))
    return tuple(map(tuple, per_rank)), costs[order]
