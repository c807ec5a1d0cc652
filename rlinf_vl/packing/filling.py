"""How micro-batches are filled with groups: one way of many, of which the planner takes the best.

Invariants: every trajectory goes into exactly one bin; a bin holds a group at most once, and no more than its tokens and
trajectories allow. All numbers; nothing here knows of ranks.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Groups that are looked at when one has to be split, or when the one that would fit best does not.
CANDIDATES = 8

#: A micro-batch in the making: (group, places of its trajectories in `Sizes`), each group at most once.
Bin = list[tuple[int, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What groups and trajectories take, in tokens and in cost; group g's trajectories are `start[g]` … `start[g + 1]`.

    `once_*` (float or int [groups]) is taken by a group in every bin where one of its trajectories is, `tokens` and `cost`
    ([trajectories]) by each trajectory.
    """

    start: np.ndarray
    once_tokens: np.ndarray
    once_cost: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray


@dataclass(frozen=True, slots=True)
class Way:
    """How to fill bins.

    Attributes:
        measure: what is evened out: "cost", "tokens" or "places" (the number of trajectories).
        tolerance: a gap up to this share of the bin is left as it is.
        thrifty: split a group only where the gap outweighs the prompt that is repeated.
        tail: so many of the last bins share evenly what is left for them, those before are filled to the brim.
    """

    measure: str
    tolerance: float
    thrifty: bool
    tail: int


class Filling:
    """Bins, filled one after the other: large groups first, then the one that fits best.

    Where no whole group closes the gap one is split, and what is left of it opens the next bin. Weights are in the way's
    measure.

    Attributes:
        bins: the result of `run`.
        repeated: weight of the prompts that are there again because a group was split.
    """

    def __init__(self, sizes: Sizes, budget: int, size: int, way: Way) -> None:
        groups, n = len(sizes.once_tokens), len(sizes.tokens)
        once, each, self.full = {
            "cost": (sizes.once_cost, sizes.cost, math.inf),
            "tokens": (sizes.once_tokens, sizes.tokens, float(budget)),
            "places": (np.zeros(groups), np.ones(n), float(size)),
        }[way.measure]
        whole = once + np.add.reduceat(each, sizes.start[:-1])
        order = np.argsort(whole, kind="stable")
        self.weights, self.groups = whole[order].tolist(), order.tolist()  # whole groups that wait, by weight
        self.once, self.each = once.tolist(), each.tolist()
        self.once_tokens, self.tokens = sizes.once_tokens.tolist(), sizes.tokens.tolist()
        self.group_tokens = (sizes.once_tokens + np.add.reduceat(sizes.tokens, sizes.start[:-1])).tolist()
        self.start = sizes.start.tolist()
        self.budget, self.size, self.way = budget, size, way
        self.left, self.repeated = float(whole.sum()), 0.0
        self.rest: tuple[int, Sequence[int]] | None = None  # of a group that was split
        self.bins: list[Bin] = []

    def run(self, count: int, reserve: float = 0.0) -> None:
        """Fill `count` bins, or more where they do not hold everything. `reserve`: weight that splits are going to add."""
        while self.groups or self.rest:
            k = count - len(self.bins)
            if 0 < k <= self.way.tail:
                coming = reserve * (k - 1) / max(1, count - 1)
                self.fill(min((self.left + coming) / k, self.full), last=k == 1)
            elif self.full < math.inf:
                self.fill(self.full, last=False)
            else:  # cost alone says nothing of how many bins it takes
                self.bins += [[]] * len(self.each)
                return

    def fill(self, target: float, last: bool) -> None:
        """Fill the next bin up to about `target`, or, the last one, with everything if it fits."""
        self.bin: Bin = []
        self.gap, self.room, self.places, self.slack = target, self.budget, self.size, self.way.tolerance * target
        everything = last and self.all_fit()
        if self.rest:
            (group, places), self.rest = self.rest, None
            weight, tokens = self.taken_by(group, places)
            fits = weight <= self.gap + self.slack and tokens <= self.room and len(places) <= self.places
            self.put(group, places if fits or everything else self.part(group, places), places)
        while self.groups and self.rest is None and (self.pop_largest() if everything else self.step()):
            pass
        self.bins.append(self.bin)

    def step(self) -> bool:
        """Add a group or a part of one; False when the bin is done."""
        largest = self.weights[-1]
        if self.gap > largest:  # more than one are missing; leave what a pair from the middle can fill
            found = self.nearest(largest if self.gap >= 2 * largest else self.gap / 2)
            if found is not None:
                return self.put_whole(found)
        found = self.nearest(self.gap)
        miss = math.inf if found is None else abs(self.gap - self.weights[found])
        if found is not None and miss <= self.slack and miss < abs(self.gap):
            return self.put_whole(found)
        if self.bin and self.gap <= self.slack:
            return False
        split = self.best_split(min(miss, abs(self.gap)))
        if split is not None:
            at, part = split
            self.put_split(at, part)
        elif found is not None and (miss < abs(self.gap) or not self.bin):
            return self.put_whole(found)
        elif not self.bin:  # it is too small for any group; something has to go
            group = self.groups[-1]
            self.put_split(-1, self.part(group, range(self.start[group], self.start[group + 1])))
        return False

    def nearest(self, weight: float) -> int | None:
        """Where the waiting group is that comes nearest `weight`, of those that fit."""
        at = bisect_left(self.weights, weight)
        if at == len(self.weights) or (at and weight - self.weights[at - 1] <= self.weights[at] - weight):
            at -= 1
        for i in range(at, max(-1, at - CANDIDATES), -1):
            group = self.groups[i]
            if self.group_tokens[group] <= self.room and self.start[group + 1] - self.start[group] <= self.places:
                return i
        return None

    def best_split(self, bound: float) -> tuple[int, list[int]] | None:
        """(where, part) of a larger group that closes the gap best, if that costs less than `bound`."""
        best = None
        first = bisect_left(self.weights, self.gap)
        for at in range(first, len(self.groups), max(1, (len(self.groups) - first) // CANDIDATES)):
            group = self.groups[at]
            if self.way.thrifty and self.once[group] >= bound:
                continue
            places = range(self.start[group], self.start[group + 1])
            part = self.part(group, places)
            if 0 < len(part) < len(places):
                price = abs(self.gap - self.taken_by(group, part)[0]) + self.way.thrifty * self.once[group]
                if price < bound:
                    best, bound = (at, part), price
        return best

    def part(self, group: int, places: Sequence[int]) -> list[int]:
        """Those trajectories of a group that with its prompt come nearest the gap; at least one in an empty bin."""
        gap, room, free = self.gap - self.once[group], self.room - self.once_tokens[group], self.places
        chosen, smaller = [], sorted(places, key=self.each.__getitem__)
        for k in reversed(smaller):
            if free and self.tokens[k] <= room and self.each[k] <= gap:
                chosen.append(k)
                gap, room, free = gap - self.each[k], room - self.tokens[k], free - 1
        k = next((k for k in smaller if k not in chosen), None)
        if k is not None and free and self.tokens[k] <= room and (self.each[k] < 2 * gap or not (chosen or self.bin)):
            chosen.append(k)
        return sorted(chosen)

    def taken_by(self, group: int, places: Sequence[int]) -> tuple[float, int]:
        """Weight and tokens of a part of a group, prompt included."""
        weight, tokens = self.once[group], self.once_tokens[group]
        return weight + sum(self.each[k] for k in places), tokens + sum(self.tokens[k] for k in places)

    def all_fit(self) -> bool:
        """Whether one bin holds everything that is left."""
        tokens = count = 0
        if self.rest:
            tokens, count = self.taken_by(*self.rest)[1], len(self.rest[1])
        count += sum(self.start[g + 1] - self.start[g] for g in self.groups)
        return tokens + sum(self.group_tokens[g] for g in self.groups) <= self.budget and count <= self.size

    def pop_largest(self) -> bool:
        """Put the heaviest waiting group into the bin."""
        return self.put_whole(-1)

    def put_whole(self, at: int) -> bool:
        """Put the waiting group at `at` into the bin. Always true: the bin may take more."""
        weight, group = self.weights.pop(at), self.groups.pop(at)
        places = range(self.start[group], self.start[group + 1])
        self.note(group, places, weight, self.group_tokens[group])
        return True

    def put_split(self, at: int, part: list[int]) -> None:
        """Put `part` of the waiting group at `at` into the bin; the others wait."""
        self.weights.pop(at)
        group = self.groups.pop(at)
        self.put(group, part, range(self.start[group], self.start[group + 1]))

    def put(self, group: int, part: Sequence[int], places: Sequence[int]) -> None:
        """Take `part` of `places`; the others wait for the next bin, with another copy of the prompt."""
        if part:
            self.note(group, part, *self.taken_by(group, part))
        if len(part) < len(places):
            self.rest = (group, [k for k in places if k not in part])
            if part:
                self.left += self.once[group]
                self.repeated += self.once[group]

    def note(self, group: int, places: Sequence[int], weight: float, tokens: int) -> None:
        """Into the bin, and off what it and the rest have left."""
        self.bin.append((group, places))
        self.gap, self.room, self.places = self.gap - weight, self.room - tokens, self.places - len(places)
        self.left -= weight
