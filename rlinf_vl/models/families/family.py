"""The description of a model family: where its modules are, how they compute, and what they cost.

Other code asks the family and never compares a `model_type`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoModelForImageTextToText

from rlinf_vl.types import Prices


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """The output of the vision tower for some images, in order.

    `tokens` is [N, H]; `deepstack` has one [N, H] per deepstack layer.
    """

    tokens: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()

    def select(self, rows: torch.Tensor) -> "VisionFeatures":
        """Return the features of these tokens."""
        return VisionFeatures(self.tokens[rows], tuple(layer[rows] for layer in self.deepstack))


@dataclass(frozen=True, slots=True)
class DecodeState:
    """The tensors that decoding stores.

    These are keys and values per token in some layers, and tensors of fixed size per row in others.
    """

    kv_layers: tuple[int, ...]  # numbers of the layers that attend to all earlier tokens
    kv_heads: int
    head_dim: int
    #: Number of a recurrent layer → shapes of its state for each row, in float32.
    row_shapes: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def token_bytes(self, dtype: torch.dtype) -> int:
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
        """The dtype of `TokenSequence.routes`."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)


class ImageProcessor(Protocol):
    """Cuts images into the patches that the vision tower reads."""

    patch_size: int
    merge_size: int

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (t, h, w) in patches of an image of this many pixels, after resizing."""
        ...

    def patches(self, image: Image.Image) -> np.ndarray:
        """Return an RGB image's patches: float32 [t·h·w, channels · temporal patch · patch²]."""
        ...


def same_name(name: str, weight: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Return (name, weight): `engine_names` where SGLang reads transformers' names and layouts."""
    return ((name, weight),)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Paths are dotted paths in the transformers model. A config is transformers', of the whole model.
    Where `vision_tower` is None the family reads no images, and nothing that concerns images is
    called.
    """

    model_type: str  # as in the checkpoint's config.json
    auto_model: Any = AutoModelForImageTextToText  # the class of transformers that loads it
    text_model: str
    text_blocks: str
    vision_tower: str | None
    vision_blocks: str | None
    projector: tuple[str, ...]  # modules in the tower that turn patches into tokens
    #: Paths (see `submodules`) of modules that FSDP shards as separate units, inner ones first; the
    #: root's unit has all other weights.
    fsdp_units: tuple[str, ...]
    image_token: str  # the placeholder of one image token
    special_tokens: tuple[str, ...]  # vision placeholders, which may never be sampled
    #: (tokenizer, checkpoint, trust_remote_code) → ids that end a response
    stop_ids: Callable[[Any, str | Path, bool], tuple[int, ...]]
    #: class name of a module → the `forward` that replaces the module's own
    layers: Mapping[str, Callable[..., object]]
    #: (ids [T], image token id, grids [n, 3], merge size) → int64 [4, T], rows (text, t, h, w)
    positions: Callable[[np.ndarray, int, np.ndarray, int], np.ndarray]
    #: (text model, embeddings [1|S, T, H], positions [4, 1|S, T], positions of image tokens int64
    #: [N] or None, deepstack features, context=AttentionContext) → last hidden state [1|S, T, H]
    text_forward: Callable[..., torch.Tensor]
    #: (vision tower, patches [P, d], grids int64 [n, 3], dtype that the tower computes in) →
    #: features
    encode_images: Callable[[nn.Module, torch.Tensor, np.ndarray, torch.dtype], VisionFeatures]
    #: (checkpoint, min_pixels, max_pixels) → processor; None for a bound means the checkpoint's own
    image_processor: Callable[[str | Path, int | None, int | None], ImageProcessor]
    #: config → (patches, grids) of the smallest image
    blank_image: Callable[[Any], tuple[np.ndarray, np.ndarray]]
    feature_layers: Callable[[Any], int]  # config → number of tensors in `VisionFeatures`
    #: (config, whether the tower is trained) → relative costs, from which batches are planned
    prices: Callable[[Any, bool], Prices]
    decode_state: Callable[[Any], DecodeState]  # config → the tensors that an engine stores
    #: (name, weight) in transformers → the names and weights that SGLang loads
    engine_names: Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]] = same_name
    #: config → per part of it, keys that SGLang reads and that transformers ignores or may lack
    engine_config: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda config: {}
    #: config → its mixtures of experts, None where it has none
    mixture: Callable[[Any], Mixture | None] = lambda config: None
    #: Last parts of the names of weights that are float32 whatever the model's dtype: in training,
    #: in engines and in exports.
    float32_weights: tuple[str, ...] = ()
    #: First parts of the names of weights that checkpoints have and transformers' model lacks. An
    #: export has them unchanged.
    carried_weights: tuple[str, ...] = ()

    def stays_float32(self, name: str) -> bool:
        """Return whether the weight of this name is one of `float32_weights`."""
        return name.rpartition(".")[2] in self.float32_weights


def submodules(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules at a dotted path, in which `*` stands for every child."""
    modules = [model]
    for name in path.split("."):
        modules = [
            child
            for m in modules
            for child in (m.children() if name == "*" else [m.get_submodule(name)])
        ]
    return modules
