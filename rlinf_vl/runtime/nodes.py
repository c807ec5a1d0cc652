"""The nodes of the Ray cluster, in the order in which a placement numbers them, and those that join
and leave during a run."""

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
    """Return living nodes that have slots of this kind (a Ray resource: CPU, GPU): the cluster's
    head first, then by address."""
    keyed_nodes = []
    for node in ray.nodes():
        slots = int(node["Resources"].get(kind, 0)) if node["Alive"] else 0
        if slots:
            address, is_head = (
                node["NodeManagerAddress"],
                "node:__internal_head__" in node["Resources"],
            )
            # as numbers, so that 10.0.0.9 comes before 10.0.0.10
            try:
                address_number = int(ip_address(address))
            except ValueError:  # a host's name
                address_number = 0
            keyed_nodes.append(
                (
                    (not is_head, address_number, address, node["NodeID"]),
                    Node(node["NodeID"], address, slots),
                )
            )
    return [node for _, node in sorted(keyed_nodes, key=lambda pair: pair[0])]


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """The resources of one rollout worker.

    Attributes:
        options: its Ray options.
        slots: of its engine.
        shared: an actor rank has one of the slots, or all of them, too.
        further_slots: Ray options of a task in the bundle of each slot but the first, where these
            are bundles of their own; the GPUs are then looked up (`ray_process.gpu_ids`).
        node: the node that it can't leave; None: Ray moves its bundle to another node if need be.
    """

    options: dict[str, Any]
    slots: int = 1
    shared: bool = False
    further_slots: tuple[dict[str, Any], ...] = ()
    node: str | None = None


class ElasticNodes:
    """Placements on nodes that join the cluster during a run, and their loss with these nodes."""

    def __init__(
        self,
        kinds: Sequence[str],
        slots: int,
        options: Mapping[str, Any],
        ranks: Sequence[PlacementGroup],
        placed_nodes: set[str],
    ) -> None:
        """Observe the cluster from these nodes on.

        Args:
            kinds: Ray resources, one of each of which makes a slot.
            slots: of an engine on a new node.
            options: further Ray options of every worker.
            ranks: bundles of the actor ranks, on whose nodes no worker joins.
            placed_nodes: ids of nodes whose slots have workers.
        """
        self._kinds = kinds
        self._slots = slots
        self._options = options
        self._ranks = ranks
        self._placed_nodes = placed_nodes

    def place_worker(self, node: str, slots: int) -> WorkerPlacement:
        """Return a placement on this node and no other. Nothing is reserved: its worker takes the slots
        when it starts."""
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        shares = {f"num_{kind.lower()}s": float(slots) for kind in self._kinds}
        options = {"scheduling_strategy": strategy, **shares, **self._options}
        return WorkerPlacement(options, slots, node=node)

    def newcomers(self) -> list[WorkerPlacement]:
        """Return placements on nodes not seen before; none while ranks wait for a node, since the
        next one is theirs."""
        tables = [placement_group_table(group) for group in self._ranks]
        if any(table["state"] != "CREATED" for table in tables):
            return []
        occupied = self._placed_nodes.union(
            *(table["bundles_to_node_id"].values() for table in tables)
        )
        new = [node for node in nodes_with(self._kinds[-1]) if node.id not in occupied]
        self._placed_nodes |= {node.id for node in new}
        return [
            self.place_worker(node.id, self._slots)
            for node in new
            for _ in range(node.slots // self._slots)
        ]

    def lost(self, placement: WorkerPlacement) -> bool:
        """Return whether the placement's node has left the cluster."""
        return placement.node is not None and all(
            node["NodeID"] != placement.node or not node["Alive"] for node in ray.nodes()
        )
