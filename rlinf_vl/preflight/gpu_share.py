"""Resolve `rollout.gpu_memory_utilization: auto` by the memory ledger of a run's own GPUs."""

import logging

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.launch import Reservation

log = logging.getLogger(__name__)


def settle_gpu_share(config: Config, model_path: str, reservation: Reservation) -> None:
    """Resolve `rollout.gpu_memory_utilization: auto` in place.

    A number is the user's choice: the ledger may only warn of it.

    Raises:
        ConfigError: no share of the GPUs' memory is enough for the engines beside the rest.
    """
    rollout, automatic = config.rollout, config.rollout.gpu_memory_utilization == "auto"
    if reservation.device != "cuda":
        if automatic:
            rollout.gpu_memory_utilization = 0.6
        return
    from rlinf_vl.preflight.advice import advise
    from rlinf_vl.preflight.ledger import Hardware, ledger
    from rlinf_vl.preflight.model import Model

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


def _gpu_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory
