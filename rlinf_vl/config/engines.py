"""Consequences of a config for its engines' weights."""

from rlinf_vl.config.placement import shares_slots
from rlinf_vl.config.schema import Config


def wakes_empty(config: Config) -> bool:
    """Return whether engines that share GPUs with ranks give up their weights when they sleep.

    No copy is kept on the host, because the sync after their sleep brings all weights, frozen ones
    too. Where it would bring much more than it does anyway (adapters, a frozen language model,
    changes only), or where not every step has a sync, SGLang keeps a copy, as it does while
    `rollout.weight_sync` is auto: a run resolves it first.
    """
    rollout, model = config.rollout, config.actor.model
    if (
        rollout.rollout_backend != "sglang"
        or rollout.weight_sync == "auto"
        or config.runner.weight_sync_interval > 1
        or model.is_lora
        or model.freeze_language_model
    ):
        return False
    from rlinf_vl.weights.strategy import strategy_named  # imports torch

    return not strategy_named(rollout.weight_sync).sends_changes


def may_broadcast(config: Config) -> bool:
    """Return whether ranks and engines may meet in a process group, as far as it is known without
    the cluster."""
    if config.rollout.weight_sync == "auto":
        return not shares_slots(config.cluster.component_placement)
    from rlinf_vl.weights.strategy import strategy_named

    return strategy_named(config.rollout.weight_sync).joins_group
