"""Whether a model without a family file computes in a way that the general path reproduces."""

import copy
import inspect
from typing import Any

import numpy as np
import torch

from rlinf_vl.models.families.qwen3 import plain_positions
from rlinf_vl.models.family import text_forward
from rlinf_vl.models.image_tokens import ImageTokens, mrope_positions
from rlinf_vl.models.model_parts import KEYS, Parts

#: Keys of configs by which models scale or cap logits.
LOGIT_KEYS = ("logit_scale", "logits_scaling", "final_logit_softcapping", "logits_soft_cap")


class _RecordingContext:
    """An `AttentionContext` that computes nothing and records which layers attend."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.windows: list[int | None] = []

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.windows.append(window)
        return torch.empty_like(q).transpose(1, 2)


def check_head(config: Any) -> None:
    """Check that logits are the products of hidden states and output embedding.

    Raises:
        ValueError: the model scales or caps them.
    """
    text = config.get_text_config()
    for key in LOGIT_KEYS:
        for part in (text, config):
            value = getattr(part, key, None)
            if value not in (None, 1, 1.0):
                raise ValueError(
                    f"{KEYS[1]}: {config.model_type} changes its logits ({key}: {value}), which is "
                    "not supported"
                )


def check_text(text: Any, layers: int, path: str, has_mrope: bool) -> None:
    """Check that every text layer attends through the context, in a forward of four `meta` tokens.

    Raises:
        ValueError: a layer does not, or the text model can't be run on packed rows.
    """
    kinds = (getattr(text.config, "layer_types", None) or ())[:layers]
    if other_kinds := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{KEYS[1]}: {path} has layers of {', '.join(sorted(other_kinds))}; only "
            "full_attention and sliding_attention are supported"
        )
    if getattr(text.config, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(
            f"{KEYS[1]}: tokens of {path} attend to all later ones (use_bidirectional_attention), "
            "which is not supported"
        )
    inputs = inspect.signature(text.forward).parameters
    if token_types := [name for name in inputs if name.endswith("token_type_ids")]:
        raise ValueError(
            f"{KEYS[1]}: {path} ({type(text).__name__}) computes image tokens by weights of their "
            f"own ({token_types[0]}), which is not supported"
        )
    context, old_implementation = _RecordingContext(), text.config._attn_implementation
    try:
        text.config._attn_implementation = "context"
        # On `meta`, PyTorch's grouped products of experts are there in this dtype alone.
        text.to(torch.bfloat16)
        embeddings = text.get_input_embeddings()(
            torch.zeros(1, 4, dtype=torch.int64, device="meta")
        )
        positions = torch.zeros(4, 1, 4, dtype=torch.int64, device="meta")
        forward = text_forward if has_mrope else plain_positions
        forward(text, embeddings, positions, None, (), context=context)
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
    slides = [window is not None for window in context.windows]
    if kinds and slides != [kind == "sliding_attention" for kind in kinds]:
        raise ValueError(
            f"{KEYS[1]}: layers of {path} get the windows {context.windows}, but the config says "
            f"{', '.join(kinds)}"
        )


def check_positions(parent: Any, config: Any) -> None:
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


def images_see_themselves(parts: Parts) -> bool:
    """Return whether tokens of an image attend to all of its tokens, by the model's own masks.

    Raises:
        ValueError: tokens attend to other later ones.
    """
    make_masks = getattr(type(parts.model), "create_masks_for_generate", None)
    inputs = inspect.signature(make_masks).parameters if make_masks else ()
    key = next((name for name in inputs if name.endswith("token_type_ids")), None)
    sees_later = ValueError(
        f"{parts.tower_text}: tokens of {type(parts.owner).__name__} attend to later ones of their "
        "prompt, which is not supported"
    )
    if make_masks is None or key is None:
        if "token_type_ids" in inspect.signature(parts.owner.forward).parameters:
            raise sees_later
        return False
    window, is_image = 3, torch.tensor([0, 1, 1, 1, 1, 1, 0, 1, 1, 0])
    config = copy.deepcopy(parts.model.config)
    text = config.get_text_config()
    text.sliding_window, text._attn_implementation = window, "sdpa"
    place = torch.arange(len(is_image))
    masks = make_masks(
        config=config,
        inputs_embeds=torch.zeros(1, len(place), 1),
        attention_mask=torch.ones(1, len(place), dtype=torch.int64),
        past_key_values=None,
        position_ids=place[None],
        **{key: is_image[None]},
    )
    if not isinstance(masks, dict):
        masks = {"full_attention": masks}
    run = torch.cumsum(is_image.diff(prepend=is_image[:1]) == 1, 0)
    same_image = (run[:, None] == run) & (is_image[:, None] * is_image == 1)
    causal, near = place <= place[:, None], place > place[:, None] - window
    for sees_itself in (False, True):
        full = causal | same_image if sees_itself else causal
        expected = {"full_attention": full, "sliding_attention": full & near}
        # No mask at all is causal attention.
        if all(
            torch.equal(causal if mask is None else mask[0, 0], expected[kind])
            for kind, mask in masks.items()
        ):
            return sees_itself
    raise sees_later
