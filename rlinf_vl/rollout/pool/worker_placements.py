"""The placements of a pool's workers by number: which have lost their node, which join with one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import ray
from ray.exceptions import RayError

from rlinf_vl.rollout.pool.slot import Place
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.lost_placements import NODE_LOSS_HINT, find_lost
from rlinf_vl.runtime.nodes import WorkerPlacement


class WorkerPlacements:
    """The placements of a reservation's workers, and of those that join.

    Attributes:
        may_change: whether workers may join and leave.
    """

    def __init__(
        self, reservation: Reservation, *, shrinks: bool, report: Callable[[str, str], None]
    ) -> None:
        """
        Args:
            shrinks: whether a worker leaves with its node (`cluster.on_node_loss`).
            report: called with a kind of event and a sentence.
        """
        self.may_change = False
        self._by_number = list(reservation.rollout)
        self._elastic = reservation.elastic
        self._shrinks = shrinks
        self._report = report
        self._reported_waits: set[int] = set()  # workers whose wait for a node was reported

    def __getitem__(self, number: int) -> WorkerPlacement:
        return self._by_number[number]

    def newcomers(self) -> Sequence[int]:
        """Return the numbers of new workers, for nodes that have joined."""
        if self._elastic is None or not self.may_change or not ray.is_initialized():
            return ()
        first = len(self._by_number)
        with suppress(RayError):  # the cluster's head does not answer: the next call tries again
            self._by_number += self._elastic.newcomers()
        return range(first, len(self._by_number))

    def places(self, numbers: Collection[int], n_workers: int) -> Mapping[int, Place]:
        """Return the places of these workers that no node has now.

        In an elastic reservation a place is gone with its node. Otherwise its worker waits for a
        node, which is reported once, or leaves if the run shrinks; the last of the `n_workers` of
        the pool always waits.
        """
        if not self.may_change or not ray.is_initialized():
            return {}
        try:
            if self._elastic is not None:
                return {
                    number: Place.GONE
                    for number in numbers
                    if self._elastic.lost(self._by_number[number])
                }
            ordered = list(numbers)
            lost = find_lost([self._by_number[number].options for number in ordered])
        except RayError:  # the cluster's head does not answer: the next call tries again
            return {}
        lost_numbers = [ordered[index] for index in lost]
        if self._shrinks and n_workers > 1:
            return dict.fromkeys(lost_numbers, Place.GONE)
        for number in set(lost_numbers) - self._reported_waits:
            self._reported_waits.add(number)
            message = f"rollout worker {number} waits for its node: {NODE_LOSS_HINT}"
            self._report("node_lost", message)
        return dict.fromkeys(lost_numbers, Place.AWAITED)
