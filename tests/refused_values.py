"""What expressions of tests/golden/refusals.txt name. They are evaluated in a folder of the files of tests/refusals.py."""

from rlinf_vl.config.placement import Placement, check_placement, placement_of
from rlinf_vl.config.schema import Config


def placed(
    placement: object,
    *nodes: int,
    tp: int = 1,
    context: int = 1,
    experts: int = 1,
    backend: str = "sglang",
    elastic: bool = False,
) -> Placement:
    """Place actor and rollout on nodes of so many slots; by default on one node of four."""
    config = Config()
    config.cluster.component_placement = (
        {"actor,rollout": placement} if isinstance(placement, str) else placement
    )
    config.cluster.elastic_rollout = elastic
    config.rollout.rollout_backend, config.rollout.tensor_parallel_size = backend, tp
    config.actor.context_parallel_size = context
    config.actor.fsdp_config.expert_parallel_size = experts
    check_placement(config)
    return placement_of(config, nodes or (4,))
