"""The groups into which the GPUs of an SGLang engine are divided."""

from collections.abc import Iterable

from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError


def check_engine_groups(config: Config, sizes: Iterable[int]) -> None:
    """Raise ConfigError unless groups of an engine's slots divide every engine.

    `sizes`: number of slots of each engine.
    """
    for size in sorted(set(sizes)):
        for name in ("ep_size", "attn_dp_size"):
            groups = config.rollout.sglang.server_args.get(name, 1)
            if type(groups) is not int or groups < 1 or size % groups:
                raise ConfigError(
                    f"rollout.sglang.server_args.{name}: {groups!r} does not divide the {size} "
                    "slots of an engine (rollout.tensor_parallel_size, or "
                    "cluster.component_placement)"
                )
