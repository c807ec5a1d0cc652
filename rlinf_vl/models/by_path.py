"""A family that is not in the table, by the paths of its vision tower and its text model.

Its modules compute as in transformers, except that text layers attend through the
`AttentionContext` of the running forward: transformers' attention interface hands it their rotated
queries, keys and values. The requirements are checked on a model without weights: every text layer
attends to all earlier tokens through that interface; the tower takes patches and their grids, as
the towers of Qwen2-VL and its descendants do; image tokens have the positions of M-RoPE.
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
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL
from rlinf_vl.models.families.qwen3_vl import deepstack_text_forward
from rlinf_vl.models.family import Family, VisionFeatures, text_forward
from rlinf_vl.models.image_processor import QwenImages
from rlinf_vl.models.image_tokens import ImageTokens, mrope_positions
from rlinf_vl.models.shapes import head_dim
from rlinf_vl.models.transfer import on_device
from rlinf_vl.types import Prices

#: Dotted paths of a vision tower and a text model, and the config's keys of them.
Paths = tuple[str, str]
KEYS = "actor.model.vlm.vision_encoder_attr", "actor.model.vlm.language_model_attr"


def parts_at(
    config: PreTrainedConfig, paths: Paths, trust_remote_code: bool
) -> tuple[nn.Module, Any, Any]:
    """Return (model without weights, its vision tower, its text model), by the paths of the two.

    Raises:
        ValueError: there is no such model or module, or one module contains the other.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(
                config, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
            )
    except ValueError as error:  # transformers has no such class for this config
        raise ValueError(
            f"{KEYS[0]}: {config.model_type} is no vision-language model of transformers"
        ) from error
    tower, text = (_module_at(model, key, path) for key, path in zip(KEYS, paths, strict=True))
    if paths[0].startswith(f"{paths[1]}.") or paths[1].startswith(f"{paths[0]}.") or tower is text:
        raise ValueError(
            f"{KEYS[0]}: {paths[0]!r} and {KEYS[1]}: {paths[1]!r} are not modules apart"
        )
    return model, tower, text


def family_by_path(
    config: Any,
    paths: Paths,
    model: nn.Module,
    tower: Any,
    text: Any,
    checkpoint: str | Path,
    trust_remote_code: bool,
) -> Family:
    """Make the family of models with this config, from `parts_at` these paths.

    Args:
        checkpoint: the folder of the tokenizer, from which the image tokens are read; without it
            ("") they stay unknown.

    Raises:
        ValueError: the modules can't be used; the message says what is missing.
    """
    parameters = list(inspect.signature(tower.forward).parameters)
    if "grid_thw" not in parameters:
        raise ValueError(
            f"{KEYS[0]}: {paths[0]} ({type(tower).__name__}) takes {', '.join(parameters)}; only "
            "towers that take patches and grid_thw, as Qwen2-VL's does, are supported"
        )
    blocks = [
        f"{path}.{_blocks_of(module, key)}"
        for path, module, key in zip(paths, (tower, text), KEYS, strict=True)
    ]
    _check_text(text, len(list(model.get_submodule(blocks[1]).children())), paths[1])
    _check_positions(model.get_submodule(paths[0].rpartition(".")[0]), config)
    # Modules that follow the tower's blocks turn patches into tokens: they are the projector.
    children = [name for name, _ in tower.named_children()]
    projector_names = children[children.index(blocks[0].rpartition(".")[2]) + 1 :]
    tokens: list[str] = []
    if checkpoint:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        token_ids = {
            name: i
            for name, i in config.to_dict().items()
            if name.endswith("_token_id") and isinstance(i, int)
        }
        ids = [i for name, i in token_ids.items() if name.startswith(("vision", "image", "video"))]
        tokens = tokenizer.convert_ids_to_tokens([token_ids["image_token_id"], *ids])
    with_deepstack = "deepstack_visual_embeds" in inspect.signature(text.forward).parameters
    return replace(
        QWEN3_VL,
        model_type=config.model_type,
        text_model=paths[1],
        text_blocks=blocks[1],
        vision_tower=paths[0],
        vision_blocks=blocks[0],
        projector=tuple(f"{paths[0]}.{name}" for name in projector_names),
        fsdp_units=(f"{blocks[0]}.*", f"{blocks[1]}.*", paths[0]),
        image_token=tokens[0] if tokens else "",
        special_tokens=tuple(tokens),
        layers=dict,
        text_forward=deepstack_text_forward if with_deepstack else text_forward,
        encode_images=encode_images,
        image_processor=AnyImages,
        prices=partial(_prices, model.get_submodule(blocks[1]), tower),
    )


def _module_at(model: nn.Module, key: str, path: str) -> nn.Module:
    """Return the module at a dotted path.

    Raises:
        ValueError: a segment of the path names no module; the message lists the modules there.
    """
    module, names_so_far = model, []
    for segment in path.split("."):
        submodules = dict(module.named_children())
        if segment not in submodules:
            where = f"{'.'.join(names_so_far) or 'the model'} ({type(module).__name__})"
            raise ValueError(
                f"{key}: {path!r}: {where} has no module {segment!r}; it has "
                f"{', '.join(submodules) or 'none at all'}"
            )
        module = submodules[segment]
        names_so_far.append(segment)
    return module


def _blocks_of(module: nn.Module, key: str) -> str:
    """Return the name of a module's largest list of layers, by parameters."""
    lists = {
        name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)
    }
    if not lists:
        raise ValueError(
            f"{key}: {type(module).__name__} has no list of layers; name the module that has"
        )
    return max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))


class _RecordingContext:
    """An `AttentionContext` that computes nothing and records which layers attend."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        self.layers.append(layer)
        return torch.empty_like(q).transpose(1, 2)


def attend(
    module: Any, query, key, value, attention_mask, *, context, scaling, **options
) -> tuple[torch.Tensor, None]:
    """Attend through the forward's `context`: a function of transformers' attention interface."""
    if unsupported := [
        name
        for name in ("softcap", "sliding_window", "s_aux", "position_bias")
        if options.get(name)
    ]:
        raise ValueError(
            f"{type(module).__name__} attends with {', '.join(unsupported)}, which is not supported"
        )
    return context.attend(module.layer_idx, query, key, value, scaling), None


ALL_ATTENTION_FUNCTIONS.register("context", attend)


def _check_text(text: Any, layers: int, path: str) -> None:
    """Check that every text layer attends through the context, in a forward of four `meta` tokens.

    Raises:
        ValueError: a layer does not, or the text model can't be run on packed rows.
    """
    other_kinds = set(getattr(text.config, "layer_types", None) or ()) - {"full_attention"}
    if other_kinds:
        raise ValueError(
            f"{KEYS[1]}: {path} has layers of {', '.join(sorted(other_kinds))}; only "
            "full_attention is supported"
        )
    context, old_implementation = _RecordingContext(), text.config._attn_implementation
    try:
        text.config._attn_implementation = "context"
        embeddings = text.get_input_embeddings()(
            torch.zeros(1, 4, dtype=torch.int64, device="meta")
        )
        positions = torch.zeros(4, 1, 4, dtype=torch.int64, device="meta")
        text_forward(text, embeddings, positions, None, (), context=context)
    except Exception as error:  # unknown code of an unknown family may raise anything
        raise ValueError(
            f"{KEYS[1]}: {path} ({type(text).__name__}) can't be run on packed rows: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        text.config._attn_implementation = old_implementation
    if context.layers != list(range(layers)):
        raise ValueError(
            f"{KEYS[1]}: of the {layers} layers of {path} only {context.layers} attend through "
            "transformers' attention interface"
        )


def _check_positions(parent: Any, config: Any) -> None:
    """Compare our positions with the model's own, for a text with two images.

    Raises:
        ValueError: they differ, or the model has no M-RoPE positions.
    """
    merge_size, image_id = config.vision_config.spatial_merge_size, config.image_token_id
    # Two images of different shapes, text around them: an error in either's offset shows.
    grids = np.array([[1, 2 * merge_size, 3 * merge_size], [1, 3 * merge_size, merge_size]])
    start = (
        getattr(config, "vision_start_token_id", None)
        or getattr(config, "image_start_token_id", None)
        or 1
    )
    ids = np.array([2, start, *[image_id] * 6, 3, 4, start, *[image_id] * 3, 5])
    row = torch.from_numpy(ids)[None]
    try:
        model_positions, _ = parent.get_rope_index(
            row, mm_token_type_ids=(row == image_id).int(), image_grid_thw=torch.from_numpy(grids)
        )
    except Exception as error:  # unknown code again; most often the method is missing
        raise ValueError(
            f"{KEYS[0]}: {type(parent).__name__} has no M-RoPE positions: {type(error).__name__}: "
            f"{error}"
        ) from error
    positions = mrope_positions(ids, grids, ImageTokens(image_id, merge_size))
    if not np.array_equal(model_positions[:, 0].numpy(), positions[1:]):
        raise ValueError(
            f"{KEYS[0]}: {type(parent).__name__} gives image tokens other positions than M-RoPE's"
        )


def encode_images(
    tower: nn.Module, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype
) -> VisionFeatures:
    """Run the tower on patches and grids alone: `Family.encode_images` of such a family."""
    out = tower(
        patches.to(dtype), grid_thw=on_device(grids, "cpu" if patches.is_meta else patches.device)
    )
    return VisionFeatures(out.pooler_output, tuple(getattr(out, "deepstack_features", ())))


class AnyImages(QwenImages):
    """Patches made by the checkpoint's own processor, which is run once for each image size."""

    @staticmethod
    def load(path: str | Path) -> Any:
        return AutoImageProcessor.from_pretrained(path, backend="pil")

    @cache  # noqa: B019  # one processor in a process
    def grid(self, height: int, width: int) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        processed = self._processor(images=[Image.new("RGB", (width, height))], return_tensors="np")
        return tuple(processed["image_grid_thw"][0].tolist())


def _prices(text_blocks: nn.Module, tower: nn.Module, config: Any, tower_trained: bool) -> Prices:
    """Return the prices of `qwen.prices`, estimated from the numbers of parameters.

    Each parameter of the text model is multiplied once per token, each of the tower once per patch.
    """
    text = config.get_text_config()
    linear = sum(p.numel() for p in text_blocks.parameters())
    return Prices(
        attention=2 * text.num_attention_heads * head_dim(text) * text.num_hidden_layers / linear,
        head=text.vocab_size * text.hidden_size / linear,
        patch=sum(p.numel() for p in tower.parameters()) / linear * (1 if tower_trained else 1 / 3),
    )
