"""Settle the `auto` of keys on memory by the memory ledger of a run's own GPUs."""

import logging

import ray

from rlinf_vl.config.automatic import settle_without_ledger
from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.launch import Reservation

log = logging.getLogger(__name__)


def settle_memory(config: Config, model_path: str, reservation: Reservation) -> None:
    """Settle `auto` in place, in `rollout.gpu_memory_utilization` and in `actor.fsdp_config`.

    Other values are the user's choice: the ledger may only warn of them.

    Raises:
        ConfigError: no share of the GPUs' memory is enough for the engines beside the rest.
    """
    rollout, automatic = config.rollout, config.rollout.gpu_memory_utilization == "auto"
    if reservation.device != "cuda":
        settle_without_ledger(config, reservation.device)
        return
    from rlinf_vl.tools.memory.advice import advise
    from rlinf_vl.tools.memory.ledger import Hardware, ledger
    from rlinf_vl.tools.memory.model import Model

    # In a process that ends after the call: a CUDA context would keep memory that the actors need.
    read_gpu_bytes = ray.remote(max_calls=1)(_gpu_bytes)
    options_by_slot = [
        *reservation.actor,
        *(placement.options for placement in reservation.rollout),
    ]
    sizes = [read_gpu_bytes.options(**options).remote() for options in options_by_slot]
    hardware = Hardware(int(ray.cluster_resources().get("GPU", 0)), min(ray.get(sizes)))
    model = Model(config, model_path)
    memory_ledger = ledger(config, hardware, model, reservation.placement)
    advice = (
        advise(memory_ledger, model, reservation.placement, elsewhere=False)
        if memory_ledger.problems
        else []
    )
    if memory_ledger.problems and automatic:
        raise ConfigError(f"{'; '.join(memory_ledger.problems)}; {advice[0]}")
    for problem in (*memory_ledger.problems, *advice):
        log.warning("memory: %s", problem)
    rollout.gpu_memory_utilization = memory_ledger.share
    if automatic:
        log.info(
            "rollout.gpu_memory_utilization auto is %.2f: a KV cache of %d tokens",
            memory_ledger.share,
            memory_ledger.kv_tokens,
        )
    for key in memory_ledger.settled:
        value = getattr(memory_ledger.config.actor.fsdp_config, key)
        setattr(config.actor.fsdp_config, key, value)
        log.info("actor.fsdp_config.%s auto is %s", key, str(value).lower())


def _gpu_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory
