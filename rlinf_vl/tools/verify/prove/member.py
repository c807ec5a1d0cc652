"""A tiny random member of a family: small sizes, and every kind of layer of a checkpoint."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from rlinf_vl.models.families import family_at
from rlinf_vl.models.family import Family
from rlinf_vl.models.image_processor import ImageProcessor, processor_settings
from rlinf_vl.models.image_tokens import TOKEN_KEYS, ImageTokens, image_token_id, with_videos
from rlinf_vl.models.loading import switch_dropout_off, use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.tiles import blank_tile
from rlinf_vl.models.video_processor import VideoProcessor

#: Sizes of a text model, where its config has the key. SGLang's CPU build rounds those of
#: intermediate layers up to multiples of 32, and then can't load others. The size of a head stays the checkpoint's,
#: since the sections of rotary angles add up to it.
TEXT_SIZES = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
#: Sizes of a vision tower. Sizes of patches and windows stay the checkpoint's.
VISION_SIZES = {
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "depth": 3,
    "num_hidden_layers": 3,
}
#: Keys of the layers whose features are read; transformers has renamed it.
FEATURE_LAYERS = ("vision_feature_layer", "vision_feature_layers")
#: Patches along a side of a tile, or of the image whose positions a tower has learned.
TILE_PATCHES = 4
#: Tokens that a layer with a sliding window sees: fewer than those of a tile, or of a prompt.
WINDOW = 7
HIDDEN, VISION_HIDDEN = 48, 32
#: States pass from layer to layer; each deepstack layer needs one to go to.
MIN_LAYERS = 2
#: Ids from `VOCABULARY` on are those that the config names, such as an image's placeholder.
VOCABULARY, NAMED_IDS = 64, 32


@dataclass(frozen=True)
class Member:
    """A tiny member of a family.

    Attributes:
        config: transformers' config of the whole model.
        images: cuts images as the checkpoint's own image processor does; None for a family
            without a vision tower.
        videos: the same for the clips of videos; None for a family that reads none.
        seed: of the random weights.
    """

    family: Family
    config: PretrainedConfig
    images: ImageProcessor | None
    videos: VideoProcessor | None = None
    seed: int = 0

    @property
    def image_tokens(self) -> ImageTokens:
        """The placeholders of images among the member's ids."""
        if self.images is None:
            return ImageTokens(-1)
        image_tokens = self.images.image_tokens(image_token_id(self.config))
        if self.videos is None:
            return image_tokens
        return with_videos(image_tokens, self.config, self.videos.timestamped)

    @property
    def special_ids(self) -> set[int]:
        """The ids that the config names, such as those of placeholders."""
        return set(_ids_in(self.config.to_dict()))

    @property
    def banned(self) -> np.ndarray:
        """Bool [V], True for ids that are never sampled."""
        banned = np.zeros(self.config.get_text_config().vocab_size, bool)
        stop_ids = _as_list(getattr(self.config.get_text_config(), "eos_token_id", None))
        # Another version of transformers may have defaults beyond the member's ids.
        special_ids = {i for i in self.special_ids if i < len(banned)}
        banned[sorted(special_ids - set(stop_ids))] = True
        return banned

    def model(self) -> PreTrainedModel:
        """Return transformers' model with random weights, float32, in evaluation mode.

        Weights are large enough for images to matter; biases and norms are random, too, and delta
        nets forget slowly, so that their states reach far.
        """
        torch.manual_seed(self.seed)
        # A config of its own: packed attention is switched on there.
        config = copy.deepcopy(self.config)
        model = self.family.model_class.from_config(config, attn_implementation="sdpa").eval()
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.data.uniform_(-3, 0)
            elif weight.ndim == 1:
                weight.data += 0.1 * torch.randn_like(weight)
            elif not weight.any():  # a projector that begins with zeros shows no image
                weight.data.normal_(std=weight.shape[0] ** -0.5)
        return model

    def policy(self, temperature: float = 1.0) -> PolicyModel:
        """Return the same weights as the trainer computes with them."""
        model = use_packed_attention(self.model(), self.family)
        return PolicyModel(model, self.family, self.banned, temperature=temperature, chunk=None)


class MemberTiles:
    """Cuts an image into as many tiles of the tower's size as its shape asks for, two at most."""

    def __init__(self, config: Any, tokens_per_tile: int) -> None:
        self._side = math.isqrt(blank_tile(config)[0].shape[1] // 3)
        self._tokens_per_tile = tokens_per_tile

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        return 2 if max(height, width) > 1.5 * min(height, width) else 1, 1, 1

    def patches(self, image: Image.Image) -> np.ndarray:
        """Return [tiles, 3 · side²]: the image's halves, or all of it."""
        tiles, _, _ = self.grid(image.height, image.width)
        resized = image.resize((tiles * self._side, self._side))
        pixels = np.asarray(resized, np.float32).transpose(2, 0, 1) / 127.5 - 1
        return np.stack(np.split(pixels, tiles, axis=2)).reshape(tiles, -1)

    def image_tokens(self, placeholder_id: int) -> ImageTokens:
        return ImageTokens(placeholder_id, tokens_per_tile=self._tokens_per_tile)

    def ids(self, height: int, width: int, placeholder_id: int) -> np.ndarray:
        return self.image_tokens(placeholder_id).ids(self.grid(height, width))


def member_of(family: Family, config: PretrainedConfig, folder: str | Path) -> Member:
    """Make the tiny member of a checkpoint; `config` is the checkpoint's. See `member_with`."""
    return member_with(family, tiny_config(config), folder)


def member_with(family: Family, tiny: PretrainedConfig, folder: str | Path) -> Member:
    """Make the member that has this config.

    Args:
        folder: the checkpoint's folder, or an empty one, in which the settings of an image
            processor are written that follow from the config.
    """
    _name_sections(tiny, family)
    if family.vision_tower is None:
        return Member(family, tiny, None)
    if family.blank_image is blank_tile:
        # Of the tiny tower's size, which the checkpoint's processor does not cut.
        family = replace(family, blank_tokens=family_at(tiny).blank_tokens)
        return Member(family, tiny, MemberTiles(tiny, family.blank_tokens))
    folder = Path(folder)
    if not (folder / "preprocessor_config.json").exists():
        settings = json.dumps(processor_settings(tiny))
        (folder / "preprocessor_config.json").write_text(settings)
    # One token at least; the upper bound keeps rows short.
    side = family.token_side(json.loads((folder / "preprocessor_config.json").read_text()))
    low, high = side**2, 16 * side**2
    videos = None if family.videos is None else family.videos(folder, low, high)
    return Member(family, tiny, family.image_processor(folder, low, high), videos)


def _name_sections(config: PretrainedConfig, family: Family) -> None:
    """Write the sections of M-RoPE into a config, which transformers' classes may leave out.

    Checkpoints have them, and SGLang knows by them how to count positions.
    """
    with torch.device("meta"):
        model = family.model_class.from_config(copy.deepcopy(config))
    for module in model.modules():
        if (sections := getattr(module, "mrope_section", None)) is not None:
            rope = config.get_text_config().rope_parameters
            rope.setdefault("mrope_section", list(sections))
            # Each frequency's part: time, height or width.
            parts = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 1, sum(sections)).clone()
            layout = module.recomposition_frequencies(parts)[0, 0]
            if layout[: sections[0]].any():
                rope.setdefault("mrope_interleaved", True)


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config with small sizes and every kind of layer of `config`."""
    sizes = copy.deepcopy(config.to_dict())
    _renumber(sizes, {})
    text = sizes["text_config"] if isinstance(sizes.get("text_config"), dict) else sizes
    vision = sizes.get("vision_config")
    deepstack = len((vision or {}).get("deepstack_visual_indexes") or ())
    _shrink_text(text, config.get_text_config(), max(MIN_LAYERS, deepstack))
    if sizes.get("initializer_range"):  # of the output embedding and of projectors
        sizes["initializer_range"] = text["initializer_range"]
    if sizes.get("mm_tokens_per_image"):
        sizes["mm_tokens_per_image"] = TILE_PATCHES**2
    if isinstance(vision, dict):
        _shrink_vision(vision, text["hidden_size"])
        # Several layers whose features are read, from the last on.
        for key in FEATURE_LAYERS:
            if isinstance(layers := sizes.get(key), (list, tuple)):
                depth = VISION_SIZES["num_hidden_layers"]
                sizes[key] = [-1 - i % depth for i in range(len(layers))]
    tiny = AutoConfig.for_model(**sizes)
    switch_dropout_off(tiny)
    return tiny


def _shrink_text(text: dict[str, Any], config: Any, min_layers: int) -> None:
    """Make the sizes of a text model small in place."""
    kv_heads = min(2, config.num_key_value_heads)
    heads = kv_heads * min(2, config.num_attention_heads // config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None)
    # Without a key of its own a head's size is hidden_size / heads, and rotary angles fit it.
    own_size = head_dim or config.hidden_size // config.num_attention_heads
    text |= {
        "vocab_size": VOCABULARY + NAMED_IDS,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "hidden_size": HIDDEN if head_dim else heads * own_size,
    }
    for key, size in TEXT_SIZES.items():
        if (old_size := text.get(key)) is not None:
            text[key] = [size] * len(old_size) if isinstance(old_size, (list, tuple)) else size
    if text.get("sliding_window"):
        text["sliding_window"] = WINDOW
    # Hidden states keep their size from layer to layer, so that what an early layer does shows.
    text["initializer_range"] = text["hidden_size"] ** -0.5
    kinds = _layer_kinds(config, min_layers)
    text["num_hidden_layers"] = len(kinds)
    if text.get("layer_types"):
        text["layer_types"] = [attention for attention, _ in kinds]
    if text.get("mlp_layer_types"):
        text["mlp_layer_types"] = [mlp for _, mlp in kinds]
    if text.get("mlp_only_layers") is not None:
        dense = [i for i, (_, is_mixture) in enumerate(kinds) if not is_mixture]
        text |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def _layer_kinds(config: Any, min_layers: int) -> list[tuple[str, bool | str]]:
    """Return (attention, whether it is a mixture, or the kind of its MLP) of the member's layers.

    It has each kind once, and its first kind in the layers that are missing.
    """
    attention = (
        getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    )
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", 1) or 1
    has_mixtures = bool(getattr(config, "num_experts", 0))
    mlps = getattr(config, "mlp_layer_types", None) or [
        has_mixtures and i not in dense and (i + 1) % step == 0 for i in range(len(attention))
    ]
    kinds = list(zip(attention, mlps, strict=False))
    distinct = list(dict.fromkeys(kinds))
    return distinct + distinct[:1] * (min_layers - len(distinct))


def _shrink_vision(vision: dict[str, Any], text_hidden: int) -> None:
    """Make the sizes of a vision tower small in place."""
    vision |= {key: size for key, size in VISION_SIZES.items() if vision.get(key) is not None}
    if "embed_dim" in vision:  # Qwen2-VL, whose hidden_size is that of the tower's output
        vision |= {"embed_dim": VISION_HIDDEN, "hidden_size": text_hidden}
    else:
        vision |= {"hidden_size": VISION_HIDDEN, "out_hidden_size": text_hidden}
    vision["initializer_range"] = VISION_HIDDEN**-0.5
    if vision.get("image_size"):
        patch = vision["patch_size"]
        is_square = not isinstance(patch, (list, tuple))
        vision["image_size"] = (
            TILE_PATCHES * patch if is_square else [TILE_PATCHES * side for side in patch]
        )
    # Layers of a kind by their numbers: as many as fit, not all.
    if full := vision.get("fullatt_block_indexes"):
        vision["fullatt_block_indexes"] = [0, 2][: len(full)]
    if deepstack := vision.get("deepstack_visual_indexes"):
        # As many as there are: SGLang has three, whatever a config says.
        vision["deepstack_visual_indexes"] = [0, *range(2, 1 + len(deepstack))]
        vision["depth"] = max(vision["depth"], 1 + len(deepstack))


def _renumber(settings: dict[str, Any], new_ids: dict[int, int]) -> None:
    """Replace the token ids in a config and its parts by the ids from `VOCABULARY` on."""
    for key, value in settings.items():
        if isinstance(value, dict):
            _renumber(value, new_ids)
        elif str(key).endswith(TOKEN_KEYS) and value is not None:
            ids = [new_ids.setdefault(i, VOCABULARY + len(new_ids)) for i in _as_list(value)]
            settings[key] = ids if isinstance(value, (list, tuple)) else ids[0]
    assert len(new_ids) <= NAMED_IDS


def _ids_in(settings: Mapping[str, Any]) -> list[int]:
    """Return the token ids in a config and its parts."""
    ids: list[int] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            ids += _ids_in(value)
        elif str(key).endswith(TOKEN_KEYS):
            ids += _as_list(value)
    return ids


def _as_list(value: Any) -> list[int]:
    return [v for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None]
