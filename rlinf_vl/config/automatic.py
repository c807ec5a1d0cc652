"""Keys whose `auto` is settled at a run's start, once its devices are known."""

from rlinf_vl.config.schema import Config

#: `rlinf_vl.tools.memory.automatic` settles these by the memory ledger. A run's config.yaml then has
#: what they were settled to.
SETTLED_AT_START = (
    "rollout.gpu_memory_utilization",
    "actor.fsdp_config.gradient_checkpointing",
    "actor.fsdp_config.reshard_after_forward",
)


def settle_without_ledger(config: Config, device: str) -> None:
    """Settle `auto` in place where the ledger can't: on a CPU, and in a run without Ray.

    What a CPU trains is small, and a recomputation costs a quarter of its time, so nothing is
    recomputed. The whole weights of every rank would be as many copies in one host's memory, so
    they are resharded. A GPU gets what takes the least memory.
    """
    if config.rollout.gpu_memory_utilization == "auto":
        config.rollout.gpu_memory_utilization = 0.6
    fsdp = config.actor.fsdp_config
    if fsdp.gradient_checkpointing == "auto":
        fsdp.gradient_checkpointing = "none" if device == "cpu" else "full"
    if fsdp.reshard_after_forward == "auto":
        fsdp.reshard_after_forward = True
