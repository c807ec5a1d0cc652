"""Qwen3.5 with mixtures of experts."""

from dataclasses import replace
from typing import Any

from rlinf_vl.models.families.qwen3_5 import FAMILY as QWEN3_5
from rlinf_vl.models.families.qwen3_5 import engine_config, layers_of
from rlinf_vl.models.families.qwen3_vl_moe import mixtures_of, normed_routes
from rlinf_vl.models.family import Forward
from rlinf_vl.models.shapes import mixture


def layers() -> dict[str, Forward]:
    """Return `Family.layers`."""
    return layers_of("Qwen3_5Moe") | mixtures_of("Qwen3_5Moe")


def moe_engine_config(config: Any) -> dict[str, dict[str, Any]]:
    """Return the keys of `engine_config`, and those of mixtures of experts."""
    return {
        "text_config": engine_config(config)["text_config"] | normed_routes(config)["text_config"]
    }


FAMILY = replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    layers=layers,
    mixture=mixture,
    engine_config=moe_engine_config,
)
