"""The nodes of the Ray cluster, in the order in which a placement numbers them, and those that join and leave in mid-run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@dataclass(frozen=True, slots=True)
class Node:
    """A living node: Ray's id of it, its address, and its slots."""

    id: str
    address: str
    slots: int


def nodes_with(kind: str) -> list[Node]:
    """Living nodes that have slots of this kind (a Ray resource: CPU, GPU): the cluster's head first, then by address."""
    found = []
    for node in ray.nodes():
        slots = int(node["Resources"].get(kind, 0)) if node["Alive"] else 0
        if slots:
            address, is_head = node["NodeManagerAddress"], "node:__internal_head__" in node["Resources"]
            try:
                number = int(ip_address(address))
            except ValueError:  # a name
                number = 0
            found.append(((not is_head, number, address, node["NodeID"]), Node(node["NodeID"], address, slots)))
    return [node for _, node in sorted(found, key=lambda pair: pair[0])]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rollout worker runs: its Ray options, the slots of its engine, whether an actor rank has them, too; and the node
    that it can't leave (None: Ray finds its bundle another one)."""

    options: dict[str, Any]
    slots: int = 1
    shared: bool = False
    node: str | None = None


class ElasticNodes:
    """Seats on nodes that join the cluster in mid-run, and the loss of seats with their nodes."""

    def __init__(
        self,
        kinds: Sequence[str],
        slots: int,
        options: Mapping[str, Any],
        ranks: Sequence[PlacementGroup],
        known: set[str],
    ) -> None:
        """
        Args:
            kinds: Ray resources, one of each of which makes a slot.
            slots: of an engine on a new node.
            options: further Ray options of every worker.
            ranks: bundles of the actor ranks, on whose nodes nobody joins.
            known: nodes whose slots have been placed.
        """
        self._kinds = kinds
        self._slots = slots
        self._options = options
        self._ranks = ranks
        self._known = known

    def seat(self, node: str, slots: int) -> Seat:
        """A seat on this node and no other. Nothing is reserved: its worker takes the slots when it starts."""
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        shares = {f"num_{kind.lower()}s": float(slots) for kind in self._kinds}
        return Seat({"scheduling_strategy": strategy, **shares, **self._options}, slots, node=node)

    def newcomers(self) -> list[Seat]:
        """Seats on nodes not seen before. None while ranks wait for a node, which then is theirs."""
        tables = [placement_group_table(group) for group in self._ranks]
        if any(table["state"] != "CREATED" for table in tables):
            return []
        taken = self._known.union(*(table["bundles_to_node_id"].values() for table in tables))
        new = [node for node in nodes_with(self._kinds[-1]) if node.id not in taken]
        self._known |= {node.id for node in new}
        return [self.seat(node.id, self._slots) for node in new for _ in range(node.slots // self._slots)]

    def lost(self, seat: Seat) -> bool:
        """Whether the seat's node has left the cluster."""
        return seat.node is not None and all(node["NodeID"] != seat.node or not node["Alive"] for node in ray.nodes())
