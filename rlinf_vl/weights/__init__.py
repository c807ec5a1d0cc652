"""Weights from actor ranks to engines: one file for each strategy of `rollout.weight_sync`.

A strategy is a class after `strategy.Strategy`, in a file of this room, and its entry in
`STRATEGIES`; `sender` has the steps of a sync. This module imports nothing, as the config takes the
names of the strategies from here.
"""

from typing import NamedTuple


class Listing(NamedTuple):
    """The entry of a strategy: its class, as module:Class, and a description for users."""

    path: str
    summary: str


#: The strategies by name. `auto` is the first that suits the placement.
STRATEGIES: dict[str, Listing] = {
    "shared_memory": Listing(
        "rlinf_vl.weights.shared_memory:SharedMemoryStrategy",
        "memory of the same GPU, by CUDA IPC; on the CPU, of the same node. auto takes it where "
        "every engine has an actor rank on its slots",
    ),
    "broadcast": Listing(
        "rlinf_vl.weights.broadcast:BroadcastStrategy",
        "from actor rank 0, by NCCL on CUDA and gloo on the CPU. auto takes it on CUDA if no "
        "engine has a rank on its slots",
    ),
    "delta": Listing(
        "rlinf_vl.weights.delta:DeltaStrategy",
        "through Ray, everywhere: what changed of each rank's shard; the first sync is whole",
    ),
    "object_store": Listing(
        "rlinf_vl.weights.object_store:ObjectStoreStrategy", "through Ray, everywhere, whole"
    ),
}
#: Former names of strategies, which the config still accepts.
FORMER_NAMES = {"nccl": "broadcast", "cuda_ipc": "shared_memory"}
#: The strategy that works whatever is lost, and takes no more device memory than any other.
FALLBACK = "object_store"
