"""The general path: a family that has no file, by its vision tower and its text model.

transformers names the two, or the config gives their paths. The modules compute as in transformers,
except that text layers attend through the `AttentionContext` of the running forward: transformers'
attention interface hands it their rotated queries, keys and values. The requirements are checked on
a model without weights:

- every text layer attends through that interface, to all earlier tokens or to those within a
  sliding window; tokens of an image may see each other;
- images are patches with grids, as those of Qwen2-VL and its descendants, or tiles of one size, and
  the model's `get_image_features` needs nothing else;
- positions are counted, or those of M-RoPE.

Whether the result is what transformers computes is for `rlinf-vl prove-family` to say.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlinf_vl.models.encoders import (
    encode_images,
    encode_patches,
    encode_square_patches,
    encode_tiles,
    encode_unpadded_tiles,
)
from rlinf_vl.models.expert_modules import active_numel
from rlinf_vl.models.families.qwen3 import plain_positions
from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL
from rlinf_vl.models.families.qwen3_vl import deepstack_text_forward
from rlinf_vl.models.family import Family, VisionFeatures, text_forward
from rlinf_vl.models.image_processor import QwenImages
from rlinf_vl.models.image_tokens import (
    TOKEN_KEYS,
    counted_positions,
    image_token_id,
    mrope_positions,
)
from rlinf_vl.models.model_parts import KEYS, Parts
from rlinf_vl.models.path_checks import (
    check_head,
    check_positions,
    check_text,
    images_see_themselves,
)
from rlinf_vl.models.shapes import head_dim
from rlinf_vl.models.tiles import TileImages, blank_tile, patches_of_tile
from rlinf_vl.types import Prices


def family_by_path(
    config: Any, parts: Parts, checkpoint: str | Path, trust_remote_code: bool
) -> Family:
    """Make the family of models with this config.

    Args:
        checkpoint: the folder of the tokenizer, from which the image tokens are read; without it
            ("") they stay unknown.

    Raises:
        ValueError: the modules can't be used; the message says what is missing.
    """
    model, paths = parts.model, parts.paths
    owner, takes_patches = parts.owner, _takes_patches(parts)
    blocks = [
        f"{path}.{_blocks_of(module, key)}"
        for path, module, key in zip(paths, (parts.tower, parts.text), KEYS, strict=True)
    ]
    has_mrope = hasattr(owner, "get_rope_index")
    layers = len(list(model.get_submodule(blocks[1]).children()))
    check_text(parts.text, layers, paths[1], has_mrope)
    check_head(config)
    if has_mrope:
        check_positions(owner, config)
    sees_itself = images_see_themselves(parts)
    projector = _projector(parts, blocks[0])
    in_tower = all(path.startswith(f"{paths[0]}.") for path in projector)
    image_token, special_tokens = _image_tokens(config, checkpoint, trust_remote_code)
    with_deepstack = "deepstack_visual_embeds" in inspect.signature(parts.text.forward).parameters
    text = deepstack_text_forward if with_deepstack else text_forward
    family = replace(
        QWEN3_VL,
        model_type=config.model_type,
        text_model=paths[1],
        text_blocks=blocks[1],
        vision_tower=paths[0],
        vision_blocks=blocks[0],
        projector=projector,
        fsdp_units=(f"{blocks[0]}.*", f"{blocks[1]}.*", paths[0]),
        image_token=image_token,
        special_tokens=special_tokens,
        layers=dict,
        exports_original_format=True,
        images_see_themselves=sees_itself,
        is_general_in_sglang=True,
        engine_limits=partial(_engine_limits, has_mrope, sees_itself),
        positions=mrope_positions if has_mrope else counted_positions,
        text_forward=text if has_mrope else plain_positions,
        encode_images=encode_images,
        image_processor=partial(AnyImages, trust_remote_code=trust_remote_code),
        videos=None,
        prices=partial(_prices, active_numel(model, blocks[1]), _numel(parts.tower)),
    )
    if takes_patches and in_tower:
        return family
    if takes_patches:
        # A convolution over the patch as a square, where others take its numbers in a row.
        has_squares = any(isinstance(module, nn.Conv2d) for module in parts.tower.modules())
        encoder = encode_square_patches if has_squares else encode_patches
        return replace(family, image_encoder=parts.owner_path, encode_images=encoder)
    inputs = inspect.signature(owner.get_image_features).parameters
    encoder = encode_unpadded_tiles if "pixel_attention_mask" in inputs else encode_tiles
    tower_products = _numel(parts.tower) * patches_of_tile(config)
    return replace(
        family,
        image_encoder=parts.owner_path,
        encode_images=encoder,
        prices=partial(_prices, active_numel(model, blocks[1]), tower_products),
        image_processor=partial(TileImages, trust_remote_code=trust_remote_code),
        blank_image=blank_tile,
        blank_tokens=_tokens_of_a_tile(encoder, config, parts),
    )


def _projector(parts: Parts, tower_blocks: str) -> tuple[str, ...]:
    """Return the paths of the modules that turn the tower's patches into tokens.

    They are those beside the tower, or else those in it that follow its blocks.
    """
    prefix = f"{parts.owner_path}." if parts.owner_path else ""
    projector = tuple(
        f"{prefix}{name}"
        for name, child in parts.owner.named_children()
        if child not in (parts.tower, parts.text)
    )
    if projector:
        return projector
    tower_path = parts.paths[0]
    names = [name for name, _ in parts.tower.named_children()]
    name_of_blocks = tower_blocks.removeprefix(f"{tower_path}.").split(".")[0]
    return tuple(f"{tower_path}.{name}" for name in names[names.index(name_of_blocks) + 1 :])


def _tokens_of_a_tile(encoder: Callable[..., VisionFeatures], config: Any, parts: Parts) -> int:
    """Return the number of tokens that a tile becomes.

    Raises:
        ValueError: the model can't encode one, or not to tokens as wide as the text model's.
    """
    tower = parts.tower_text
    tile, grids = blank_tile(config)
    try:
        blank = torch.empty(tile.shape, device="meta")
        tokens = encoder(parts.owner, blank, grids, parts.model.dtype).tokens
    except Exception as error:  # unknown code of an unknown family may raise anything
        # Code that counts tiles does not run without values.
        if scale := getattr(config, "scale_factor", None):
            return patches_of_tile(config) // scale**2
        raise ValueError(
            f"{tower} can't encode a tile of {tile.shape[1]} numbers: {type(error).__name__}: "
            f"{error}"
        ) from error
    width = config.get_text_config().hidden_size
    if tokens.shape[1] != width:
        raise ValueError(
            f"{tower} makes tokens of {tokens.shape[1]} numbers; those of the text model have "
            f"{width}"
        )
    return len(tokens)


def _takes_patches(parts: Parts) -> bool:
    """Return whether images are patches with grids; else they are tiles.

    Raises:
        ValueError: the model needs something else of an image.
    """
    owner, tower = parts.owner, parts.tower_text
    has_merge_size = hasattr(parts.model.config.vision_config, "spatial_merge_size")
    if "grid_thw" in inspect.signature(parts.tower.forward).parameters and has_merge_size:
        return True
    if not hasattr(owner, "get_image_features"):
        raise ValueError(f"{tower}: {type(owner).__name__} has no get_image_features")
    inputs = inspect.signature(owner.get_image_features).parameters
    if "image_grid_thw" in inputs:
        if not has_merge_size:
            raise ValueError(
                f"{tower}: its config has no spatial_merge_size, the patches of a token's side"
            )
        return True
    # What has a default follows from the config, or is a mask of padding, which tiles lack.
    needed = [name for name, p in inputs.items() if p.default is p.empty and name != "kwargs"]
    if needed != ["pixel_values"]:
        raise ValueError(
            f"{tower} encodes images by {', '.join(needed)}; only patches with their grids (as "
            "Qwen2-VL's) and tiles of one size are supported"
        )
    return False


def _image_tokens(
    config: Any, checkpoint: str | Path, trust_remote_code: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the placeholder's text, and those that may never be sampled, by the config's ids."""
    if not checkpoint:
        return "", ()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    ids = [
        i
        for name, i in config.to_dict().items()
        if name.startswith(("vision", "image", "video"))
        and name.endswith(TOKEN_KEYS)
        and isinstance(i, int)
    ]
    tokens = tokenizer.convert_ids_to_tokens([image_token_id(config), *ids])
    return tokens[0], tuple(tokens)


def _blocks_of(module: nn.Module, key: str) -> str:
    """Return the path in a module of its largest list of layers, by parameters."""
    lists = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child)
    }
    if not lists:
        raise ValueError(
            f"{key}: {type(module).__name__} has no list of layers; name the module that has"
        )
    return max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))


def attend(
    module: Any, query, key, value, attention_mask, *, context, scaling, **options
) -> tuple[torch.Tensor, None]:
    """Attend through the forward's `context`: a function of transformers' attention interface."""
    unsupported = [
        name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None
    ]
    if unsupported:
        raise ValueError(
            f"{type(module).__name__} attends with {', '.join(unsupported)}, which is not supported"
        )
    window = options.get("sliding_window")
    return context.attend(module.layer_idx, query, key, value, scaling, window), None


ALL_ATTENTION_FUNCTIONS.register("context", attend)


class AnyImages(QwenImages):
    """Patches made by the checkpoint's own processor, which is run once for each image size."""

    def __init__(
        self,
        path: str | Path,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the processor of a checkpoint, with Python of its own if it is trusted."""
        self._trust_remote_code = trust_remote_code
        super().__init__(path, min_pixels, max_pixels)

    def load(self, path: str | Path) -> Any:
        return AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=self._trust_remote_code
        )

    @cache  # noqa: B019  # one processor in a process
    def grid(self, height: int, width: int) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        processed = self._processor(images=[Image.new("RGB", (width, height))], return_tensors="np")
        return tuple(processed["image_grid_thw"][0].tolist())


def _engine_limits(
    has_mrope: bool, sees_itself: bool, config: Mapping[str, Any], on_cpu: bool
) -> Iterator[str]:
    """Yield why SGLang can't run a model: `Family.engine_limits`."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if has_mrope and "mrope_section" not in rope:
        yield "its config.json has no mrope_section, by which SGLang tells positions of images"
    if sees_itself:
        yield "the tokens of an image see each other, which our model for SGLang has not"


def _prices(text_numel: int, tower_products: int, config: Any, tower_trained: bool) -> Prices:
    """Return the prices of `shapes.prices`, estimated from the numbers of parameters.

    Each parameter of the text model is multiplied once per token, each of the tower once per patch.

    Args:
        text_numel: parameters of the text model's blocks that a token uses.
        tower_products: multiply-adds of the tower for one row of pixels, a patch or a tile.
    """
    text = config.get_text_config()
    return Prices(
        attention=2
        * text.num_attention_heads
        * head_dim(text)
        * text.num_hidden_layers
        / text_numel,
        head=text.vocab_size * text.hidden_size / text_numel,
        patch=tower_products / text_numel * (1 if tower_trained else 1 / 3),
    )


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
