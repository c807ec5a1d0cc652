"""Count the host memory of the fullest machine of a run, in bytes by part.

| part | contents |
|---|---|
| processes | actor ranks and engines, without weights |
| offloaded ranks | what `actor.enable_offload` or `cpu_offload` keeps there of weights and optimizer |
| sleeping engines | weights that engines bring back from host memory when they wake |
| sent weights | the copy of each rank's part, for engines that start later |
| checkpoint | the copy that is written while training goes on (`runner.async_save`) |
| object store | Ray's: groups with their images, and weights of `object_store` |
"""

import copy
from collections import Counter

from rlinf_vl.config.engines import wakes_empty
from rlinf_vl.config.placement import Placement
from rlinf_vl.config.schema import Config
from rlinf_vl.engines.base import release_tags
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.tools.memory.gpu_parts import GIB, Parts
from rlinf_vl.tools.memory.model import Model
from rlinf_vl.weights.strategy import Site, choose_strategy

#: Resident memory of a process with PyTorch, CUDA's libraries and its own buffers.
PROCESS_BYTES = 4 * GIB
#: Ray's object store, where the config says nothing: groups of a few steps.
STORE_BYTES = 16 * GIB


def host_memory(config: Config, model: Model, placement: Placement, gpu_bytes: int) -> Parts:
    """Return the parts of the machine that has the most ranks, rank 0 among them."""
    weights, fsdp = model.weights, config.actor.fsdp_config
    ranks = max(Counter(map(placement.node_of, placement.actor)).values())
    engine_slots = max(Counter(map(placement.node_of, placement.rollout)).values())
    shard = ranks if fsdp.strategy == "hsdp" else len(placement.actor)
    trained, rank_elements = weights.shard(shard, trained=True), weights.shard(shard)
    state = 12 * trained + model.stored * (rank_elements - trained)
    itemsize = DTYPES[config.rollout.model.precision].itemsize
    parts = {"processes": PROCESS_BYTES * (ranks + engine_slots)}
    if fsdp.cpu_offload:
        parts["offloaded ranks"] = ranks * (state + 4 * trained)  # and gradients
    elif config.actor.enable_offload:
        parts["offloaded ranks"] = ranks * state
    tp = min(map(len, placement.engines))
    engine_bytes = itemsize * weights.total // tp
    site = Site("cuda", placement.shared, placement.beside_actors)
    resolved = copy.deepcopy(config)
    resolved.rollout.weight_sync = choose_strategy(config.rollout.weight_sync, site).name
    is_empty = wakes_empty(resolved)
    sleeps = placement.shared and "weights" in release_tags(engine_bytes, gpu_bytes)
    if sleeps and not is_empty:
        parts["sleeping engines"] = engine_slots * engine_bytes
    # Engines that wake empty get frozen weights, too.
    sent_bytes = itemsize * (weights.total if sleeps and is_empty else weights.engine_elements)
    parts["sent weights"] = ranks * sent_bytes // shard
    if config.runner.async_save and config.runner.save_interval > 0:
        parts["checkpoint"] = ranks * 12 * trained
    store = STORE_BYTES
    if config.rollout.weight_sync == "object_store":
        store = max(store, 2 * sent_bytes)
    parts["object store"] = store
    return parts
