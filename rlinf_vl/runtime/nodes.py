"""The nodes of the Ray cluster, in the order in which a placement numbers them."""

from dataclasses import dataclass
from ipaddress import ip_address

import ray


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
            is_head = "node:__internal_head__" in node["Resources"]
            order = not is_head, int(ip_address(node["NodeManagerAddress"])), node["NodeID"]
            found.append((order, Node(node["NodeID"], node["NodeManagerAddress"], slots)))
    return [node for _, node in sorted(found)]
