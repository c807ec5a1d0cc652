"""A family that is not in the table, by the paths of its vision tower and its text model in the transformers model.

Its modules compute what transformers has them compute, except that text layers attend through the `AttentionContext` of the running
forward: transformers' attention interface hands it their rotated queries, keys and values. What must hold is looked at in a
model without weights: every text layer attends to all earlier tokens, through that interface; the tower takes patches and their
grids, as those of Qwen2-VL and its descendants do; image tokens have the positions of M-RoPE.
"""

import inspect
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlinf_vl.models.families.family import Family, VisionFeatures
from rlinf_vl.models.families.qwen import QwenImages, head_dim, text_forward
from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL
from rlinf_vl.models.families.qwen3_vl import deepstack_text_forward
from rlinf_vl.models.positions import mrope_positions
from rlinf_vl.models.transfer import on_device
from rlinf_vl.types import Prices

#: Dotted paths of a vision tower and a text model, and the config's keys of them.
Paths = tuple[str, str]
KEYS = "actor.model.vlm.vision_encoder_attr", "actor.model.vlm.language_model_attr"


def parts_at(config: PreTrainedConfig, paths: Paths, trust_remote_code: bool) -> tuple[nn.Module, Any, Any]:
    """(model without weights, its vision tower, its text model), by the paths of the two.

    Raises:
        ValueError: there is no such model or module, or the two are not apart.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(
                config, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
            )
    except ValueError as error:  # the config's class is none of those
        raise ValueError(f"{KEYS[0]}: {config.model_type} is no vision-language model of transformers") from error
    tower, text = (_module_at(model, key, path) for key, path in zip(KEYS, paths, strict=True))
    if paths[0].startswith(f"{paths[1]}.") or paths[1].startswith(f"{paths[0]}.") or tower is text:
        raise ValueError(f"{KEYS[0]}: {paths[0]!r} and {KEYS[1]}: {paths[1]!r} are not modules apart")
    return model, tower, text


def family_by_path(
    config: Any, paths: Paths, model: nn.Module, tower: Any, text: Any, checkpoint: str | Path, trust_remote_code: bool
) -> Family:
    """The family of models with this config, made of `parts_at` these paths.

    Args:
        checkpoint: where the tokenizer is, which knows the image tokens; "": they stay unknown.

    Raises:
        ValueError: the modules can't be used; says what is missing.
    """
    takes = list(inspect.signature(tower.forward).parameters)
    if "grid_thw" not in takes:
        raise ValueError(
            f"{KEYS[0]}: {paths[0]} ({type(tower).__name__}) takes {', '.join(takes)}; only towers that take patches and "
            "grid_thw, as Qwen2-VL's does, are supported"
        )
    blocks = [f"{path}.{_blocks_of(module, key)}" for path, module, key in zip(paths, (tower, text), KEYS, strict=True)]
    _check_text(text, len(list(model.get_submodule(blocks[1]).children())), paths[1])
    _check_positions(model.get_submodule(paths[0].rpartition(".")[0]), config)
    children = [name for name, _ in tower.named_children()]
    behind = children[children.index(blocks[0].rpartition(".")[2]) + 1 :]
    tokens: list[str] = []
    if checkpoint:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        named = {name: i for name, i in config.to_dict().items() if name.endswith("_token_id") and isinstance(i, int)}
        ids = [i for name, i in named.items() if name.startswith(("vision", "image", "video"))]
        tokens = tokenizer.convert_ids_to_tokens([named["image_token_id"], *ids])
    with_deepstack = "deepstack_visual_embeds" in inspect.signature(text.forward).parameters
    return replace(
        QWEN3_VL,
        model_type=config.model_type,
        text_model=paths[1],
        text_blocks=blocks[1],
        vision_tower=paths[0],
        vision_blocks=blocks[0],
        projector=tuple(f"{paths[0]}.{name}" for name in behind),
        fsdp_units=(f"{blocks[0]}.*", f"{blocks[1]}.*", paths[0]),
        image_token=tokens[0] if tokens else "",
        special_tokens=tuple(tokens),
        layers={},
        text_forward=deepstack_text_forward if with_deepstack else text_forward,
        encode_images=encode_images,
        image_processor=AnyImages,
        prices=partial(_prices, model.get_submodule(blocks[1]), tower),
    )


def _module_at(model: nn.Module, key: str, path: str) -> nn.Module:
    """The module at a dotted path; ValueError names the first segment that is none, and what there is instead."""
    module, passed = model, []
    for segment in path.split("."):
        there = dict(module.named_children())
        if segment not in there:
            where = f"{'.'.join(passed) or 'the model'} ({type(module).__name__})"
            raise ValueError(
                f"{key}: {path!r}: {where} has no module {segment!r}; it has {', '.join(there) or 'none at all'}"
            )
        module = there[segment]
        passed.append(segment)
    return module


def _blocks_of(module: nn.Module, key: str) -> str:
    """The name of a module's list of layers: of all its lists, the largest."""
    lists = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    if not lists:
        raise ValueError(f"{key}: {type(module).__name__} has no list of layers; name the module that has")
    return max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))


class _Recorded:
    """An `AttentionContext` that computes nothing."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        self.layers.append(layer)
        return torch.empty_like(q).transpose(1, 2)


def attend(module: Any, query, key, value, attention_mask, *, context, scaling, **options) -> tuple[torch.Tensor, None]:
    """A function of transformers' attention interface."""
    if beyond := [name for name in ("softcap", "sliding_window", "s_aux", "position_bias") if options.get(name)]:
        raise ValueError(f"{type(module).__name__} attends with {', '.join(beyond)}, which is not supported")
    return context.attend(module.layer_idx, query, key, value, scaling), None


ALL_ATTENTION_FUNCTIONS.register("context", attend)


def _check_text(text: Any, layers: int, path: str) -> None:
    """Run the text model on four tokens without values, and see which of its layers ask the context."""
    kinds = set(getattr(text.config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"{KEYS[1]}: {path} has layers of {', '.join(sorted(kinds))}; only full_attention is supported"
        )
    context, before = _Recorded(), text.config._attn_implementation
    try:
        text.config._attn_implementation = "context"
        embeddings = text.get_input_embeddings()(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
        positions = torch.zeros(4, 1, 4, dtype=torch.int64, device="meta")
        text_forward(text, embeddings, positions, None, (), context=context)
    except Exception as error:  # transformers' code of a family that nobody here has seen
        raise ValueError(
            f"{KEYS[1]}: {path} ({type(text).__name__}) can't be run on packed rows: {type(error).__name__}: {error}"
        ) from error
    finally:
        text.config._attn_implementation = before
    if context.layers != list(range(layers)):
        raise ValueError(
            f"{KEYS[1]}: of the {layers} layers of {path} only {context.layers} attend through transformers' attention interface"
        )


def _check_positions(parent: Any, config: Any) -> None:
    """Compare positions of a text with two images with those that the model itself would give them."""
    merge, image = config.vision_config.spatial_merge_size, config.image_token_id
    grids = np.array([[1, 2 * merge, 3 * merge], [1, 3 * merge, merge]])
    start = getattr(config, "vision_start_token_id", None) or getattr(config, "image_start_token_id", None) or 1
    ids = np.array([2, start, *[image] * 6, 3, 4, start, *[image] * 3, 5])
    row = torch.from_numpy(ids)[None]
    try:
        theirs, _ = parent.get_rope_index(
            row, mm_token_type_ids=(row == image).int(), image_grid_thw=torch.from_numpy(grids)
        )
    except Exception as error:  # as above; most often there is no such method
        raise ValueError(
            f"{KEYS[0]}: {type(parent).__name__} has no M-RoPE positions: {type(error).__name__}: {error}"
        ) from error
    if not np.array_equal(theirs[:, 0].numpy(), mrope_positions(ids, image, grids, merge)[1:]):
        raise ValueError(f"{KEYS[0]}: {type(parent).__name__} gives image tokens other positions than M-RoPE's")


def encode_images(tower: nn.Module, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype) -> VisionFeatures:
    out = tower(patches.to(dtype), grid_thw=on_device(grids, "cpu" if patches.is_meta else patches.device))
    return VisionFeatures(out.pooler_output, tuple(getattr(out, "deepstack_features", ())))


class AnyImages(QwenImages):
    """Images as the checkpoint's own processor makes patches of them; it is asked for the grid of each size once."""

    @staticmethod
    def load(path: str | Path) -> Any:
        return AutoImageProcessor.from_pretrained(path, backend="pil")

    @cache  # noqa: B019  # one processor in a process
    def grid(self, height: int, width: int) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = self._processor(images=[Image.new("RGB", (width, height))], return_tensors="np")
        return tuple(made["image_grid_thw"][0].tolist())


def _prices(text_blocks: nn.Module, tower: nn.Module, config: Any, tower_trained: bool) -> Prices:
    """As `qwen.prices`, by the numbers of parameters: each is multiplied once a token, the tower's once a patch."""
    text = config.get_text_config()
    linear = sum(p.numel() for p in text_blocks.parameters())
    return Prices(
        attention=2 * text.num_attention_heads * head_dim(text) * text.num_hidden_layers / linear,
        head=text.vocab_size * text.hidden_size / linear,
        patch=sum(p.numel() for p in tower.parameters()) / linear * (1 if tower_trained else 1 / 3),
    )
