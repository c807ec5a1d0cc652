"""Processes of a reservation whose node is lost: Ray has none for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

#: Advice on a lost node, which "it" stands for.
NODE_LOSS_HINT = (
    "start it again with ray_utils/start_ray.sh, or set cluster.on_node_loss=shrink and resume"
)


def find_lost(options: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the actors, given by their Ray options, that have no node.

    Their node is gone, and Ray has found no other. Ray needs some seconds to notice.
    """
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    strategies = [option["scheduling_strategy"] for option in options]
    tables = {s.placement_group.id: s.placement_group for s in strategies}
    nodes = {
        key: placement_group_table(group)["bundles_to_node_id"] for key, group in tables.items()
    }
    bundle_nodes = [
        nodes[s.placement_group.id].get(s.placement_group_bundle_index) for s in strategies
    ]
    return [number for number, node in enumerate(bundle_nodes) if node not in alive]
