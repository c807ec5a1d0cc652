"""A model's shape without its weights: from its folder, the hub's cache, or a table of the examples' models."""

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from rlinf_vl.errors import ConfigError
from rlinf_vl.models.families import Family
from rlinf_vl.models.loading import checkpoint_blocks, freeze_vision, use_packed_attention

#: config.json of hub models that the examples name, as far as it decides on memory.
KNOWN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known_models.json").read_text())


def model_config(path: str, *, trust_remote_code: bool = False) -> tuple[PretrainedConfig, str]:
    """(transformers config of the model at `path`, where it is from). Nothing is downloaded.

    Raises:
        ConfigError: there is no such folder, the hub's cache has none of that name, and neither has `KNOWN`.
    """
    if path == "toy":
        from rlinf_vl.toy.model import toy_config

        return toy_config(), "the toy's own"
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        return config, "its config.json" if Path(path).is_dir() else "the hub's cache"
    except (OSError, ValueError) as error:
        if path not in KNOWN:
            raise ConfigError(
                f"rollout.model.model_path: no config.json at {path!r}, in the folder or the hub's cache; fetch it with "
                f"'hf download {path} config.json', or name a folder"
            ) from error
    return AutoConfig.for_model(**copy.deepcopy(KNOWN[path])), "a table in rlinf_vl (not downloaded yet)"


def meta_model(
    config: PretrainedConfig, family: Family, dtype: torch.dtype, *, freeze_tower: bool, checkpointing: bool
) -> PreTrainedModel:
    """The model as a rank trains it, on the meta device: shapes, and no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(copy.deepcopy(config), attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    model = use_packed_attention(model, family).train()
    if freeze_tower:
        freeze_vision(model, family)
    if checkpointing:
        checkpoint_blocks(model, use_reentrant=False)
    return model


class Weights:
    """What the parameters of a model come to, in numbers of elements.

    Attributes:
        total, trained, tower: of all, of those that are trained, of the vision tower.
        largest: of the largest parameter.
        root: of FSDP's root unit (embeddings, final norm, an untied head); `block`: of the largest text block;
            `tower_unit`: of the largest unit of the tower.
    """

    def __init__(self, model: nn.Module, family: Family) -> None:
        self.parameters = list(model.parameters())
        tower = model.get_submodule(family.vision_tower)
        text_blocks, vision_blocks = (
            [_numel(block) for block in model.get_submodule(path).children()]
            for path in (family.text_blocks, family.vision_blocks)
        )
        self.total, self.tower = _numel(model), _numel(tower)
        self.trained = sum(p.numel() for p in self.parameters if p.requires_grad)
        self.largest = max(p.numel() for p in self.parameters)
        self.block, self.root = max(text_blocks), self.total - self.tower - sum(text_blocks)
        self.tower_unit = max(*vision_blocks, self.tower - sum(vision_blocks))

    @cache  # noqa: B019  # one model, a few numbers of ranks
    def shard(self, ranks: int, trained: bool = False) -> int:
        """Elements that rank 0 of so many has: FSDP2 cuts dimension 0, the last rank's part may be short."""
        return sum(
            math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:])
            for p in self.parameters
            if p.requires_grad or not trained
        )


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
