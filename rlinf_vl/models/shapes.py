"""Numbers that follow from a model's config: what decoding stores, experts, and computation.

A config is transformers', of the whole model. torch is not imported, see `rlinf_vl.models.family`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_vl.types import Prices

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DecodeState:
    """The tensors that decoding stores.

    These are keys and values per token in some layers, and tensors of fixed size per row in others.
    """

    kv_layers: tuple[int, ...]  # numbers of the layers that attend to earlier tokens
    kv_heads: int
    head_dim: int
    #: Number of a recurrent layer → shapes of its state for each row, in float32.
    row_shapes: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def token_bytes(self, dtype: "torch.dtype") -> int:
        """Return the bytes of one token's keys and values, in all layers."""
        return 2 * len(self.kv_layers) * self.kv_heads * self.head_dim * dtype.itemsize

    def row_bytes(self) -> int:
        """Return the bytes of one row's state that does not grow with its length."""
        return 4 * sum(prod(shape) for shapes in self.row_shapes.values() for shape in shapes)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The mixtures of experts in a model."""

    layers: tuple[int, ...]  # numbers of the layers that have one
    experts: int
    top_k: int  # experts of a token

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the column `ROUTES`."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)


def head_dim(text: Any) -> int:
    """Return the size of an attention head; some text configs have no key for it."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def prices(config: Any, tower_trained: bool, tower_products: int = 2) -> Prices:
    """Count multiply-adds of attention, head and tower, relative to a text token's linear layers.

    Counted are gated MLPs in the text model (in a mixture, the experts that a token visits), the
    projections and states of its delta nets, and tower MLPs of `tower_products` products, 3 if
    gated. A frozen tower has no backward, which is two thirds of the work.
    """
    text = config.get_text_config()
    query_width, kv_width = (
        text.num_attention_heads * head_dim(text),
        text.num_key_value_heads * head_dim(text),
    )
    if experts := getattr(text, "num_experts", 0):
        shared_width = getattr(text, "shared_expert_intermediate_size", 0)
        mlp = 3 * (text.num_experts_per_tok * text.moe_intermediate_size + shared_width) + experts
    else:
        mlp = 3 * text.intermediate_size
    recurrent = linear_layers(text)
    attending = text.num_hidden_layers - len(recurrent)
    gate_width = query_width if recurrent else 0  # families with delta nets gate their attention
    linear = text.hidden_size * (
        attending * (2 * (query_width + kv_width) + gate_width) + text.num_hidden_layers * mlp
    )
    if recurrent:
        value_heads, key_dim, value_dim = (
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
        )
        inputs = 2 * text.linear_num_key_heads * key_dim + 2 * value_heads * (value_dim + 1)
        linear += len(recurrent) * (
            text.hidden_size * (inputs + value_heads * value_dim)
            + 4 * value_heads * key_dim * value_dim
        )
    return Prices(
        attention=2 * query_width * attending / linear,
        head=text.vocab_size * text.hidden_size / linear,
        patch=patch_products(config, tower_products) / linear * (1 if tower_trained else 1 / 3),
    )


def patch_products(config: Any, tower_products: int) -> float:
    """Count the multiply-adds of one patch in the tower, in the unit of `prices`."""
    if (vision := getattr(config, "vision_config", None)) is None:
        return 0.0
    block = vision.hidden_size * (
        4 * vision.hidden_size + tower_products * vision.intermediate_size
    )
    # A merger runs once for spatial_merge_size² patches, on their concatenation.
    merged = vision.hidden_size * vision.spatial_merge_size**2
    merger = vision.hidden_size * (merged + vision.out_hidden_size)
    return vision.depth * block + feature_layers(config) * merger


def feature_layers(config: Any) -> int:
    """Return the number of tensors in `VisionFeatures`: the tokens, and one per deepstack layer."""
    return 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def mixture(config: Any) -> Mixture | None:
    """Return the mixtures of experts of a model, None if it has none."""
    text = config.get_text_config()
    if not getattr(text, "num_experts", 0):
        return None
    dense, step = (
        getattr(text, "mlp_only_layers", None) or (),
        getattr(text, "decoder_sparse_step", 1),
    )
    layers = (i for i in range(text.num_hidden_layers) if i not in dense and (i + 1) % step == 0)
    return Mixture(tuple(layers), text.num_experts, text.num_experts_per_tok)


def decode_state(config: Any) -> DecodeState:
    """Return the tensors that decoding stores: keys and values, or a delta net's state."""
    text = config.get_text_config()
    recurrent = linear_layers(text)
    row_shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
    if recurrent:
        value_heads, key_dim, value_dim = (
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
        )
        conv_width = 2 * text.linear_num_key_heads * key_dim + value_heads * value_dim
        # The last inputs of the convolution, and the state of the recurrence.
        tail_rows = text.linear_conv_kernel_dim - 1
        row_shapes = dict.fromkeys(
            recurrent, ((tail_rows, conv_width), (value_heads, key_dim, value_dim))
        )
    attending = tuple(i for i in range(text.num_hidden_layers) if i not in recurrent)
    return DecodeState(attending, text.num_key_value_heads, head_dim(text), row_shapes)


def has_windows(config: Mapping[str, Any]) -> bool:
    """Return whether layers attend within a sliding window, by the content of a config.json."""
    text = config.get("text_config") or config
    kinds = text.get("layer_types") or ["sliding_attention"] * bool(text.get("use_sliding_window"))
    return "sliding_attention" in kinds


def linear_layers(text: Any) -> tuple[int, ...]:
    """Return the numbers of the layers in a text config that are gated delta nets."""
    kinds = getattr(text, "layer_types", None) or ()
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
