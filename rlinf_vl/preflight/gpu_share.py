"""`rollout.gpu_memory_utilization: auto`, resolved by the memory ledger of the GPUs that a run has been given."""

import logging

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.launch import Reservation

log = logging.getLogger(__name__)


def settle_gpu_share(config: Config, model_path: str, reservation: Reservation) -> None:
    """Resolve `rollout.gpu_memory_utilization: auto` in place. A number is the user's: the ledger may only warn of it.

    Raises:
        ConfigError: no share of the GPUs' memory is enough for the engines beside what else the run needs.
    """
    rollout, automatic = config.rollout, config.rollout.gpu_memory_utilization == "auto"
    if reservation.device != "cuda":
        if automatic:
            rollout.gpu_memory_utilization = 0.6
        return
    from rlinf_vl.preflight.advice import advise
    from rlinf_vl.preflight.ledger import Hardware, ledger
    from rlinf_vl.preflight.model import Model

    look = ray.remote(max_calls=1)(_gpu_bytes)  # in a process that ends: the GPU is the actors'
    given = [
        look.options(**options).remote()
        for options in (*reservation.actor, *(seat.options for seat in reservation.rollout))
    ]
    hardware = Hardware(int(ray.cluster_resources().get("GPU", 0)), min(ray.get(given)))
    model = Model(config, model_path)
    made = ledger(config, hardware, model, reservation.placement)
    advice = advise(made, model, reservation.placement, elsewhere=False) if made.problems else []
    if made.problems and automatic:
        raise ConfigError(f"{'; '.join(made.problems)}; {advice[0]}")
    for problem in (*made.problems, *advice):
        log.warning("memory: %s", problem)
    rollout.gpu_memory_utilization = made.share
    if automatic:
        log.info("rollout.gpu_memory_utilization auto is %.2f: a KV cache of %d tokens", made.share, made.kv_tokens)


def _gpu_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory
