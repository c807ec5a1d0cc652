"""The description of a model family: where its modules are, how they compute, and what they cost.

Other code asks the family and never compares a `model_type`. Neither torch nor transformers is
imported here or at the top of a family's file: preflight asks families within a second, before
anything is started.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_vl.models import image_processor as images
from rlinf_vl.models import shapes
from rlinf_vl.models.image_processor import ImageProcessor
from rlinf_vl.models.image_tokens import ImageTokens, mrope_positions
from rlinf_vl.models.shapes import DecodeState, Mixture
from rlinf_vl.models.video_processor import VideoProcessor
from rlinf_vl.types import Prices

if TYPE_CHECKING:
    import torch
    from torch import nn

#: The `forward` that replaces that of a transformers module, which is its first argument.
Forward = Callable[..., object]


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """The output of the vision tower for some images, in order.

    `tokens` is [N, H]; `deepstack` has one [N, H] per deepstack layer.
    """

    tokens: "torch.Tensor"
    deepstack: "tuple[torch.Tensor, ...]" = ()

    def select(self, rows: "torch.Tensor | slice") -> "VisionFeatures":
        """Return the features of these tokens."""
        return VisionFeatures(self.tokens[rows], tuple(layer[rows] for layer in self.deepstack))


def stop_ids(tokenizer: Any, path: str | Path, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the ids that end a response, the tokenizer's end-of-turn token first.

    Then come the ids of the checkpoint's generation_config.json and config.json (mostly end of
    text). SGLang stops at the same ids.
    """
    from transformers import AutoConfig, GenerationConfig

    entries = [tokenizer.eos_token_id]
    with suppress(OSError):  # a checkpoint may have no generation_config.json
        entries.append(GenerationConfig.from_pretrained(path).eos_token_id)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    entries.append(getattr(config, "eos_token_id", None))
    ids = [
        i
        for entry in entries
        for i in (entry if isinstance(entry, (list, tuple)) else [entry])
        if i is not None
    ]
    return tuple(dict.fromkeys(ids))


def text_forward(
    text_model: "nn.Module",
    inputs_embeds: "torch.Tensor",
    position_ids: "torch.Tensor",
    image_positions: "torch.Tensor | None",
    deepstack: "Sequence[torch.Tensor]",
    **kwargs,
) -> "torch.Tensor":
    """Run a text model without deepstack: `Family.text_forward`. `kwargs` go to the model."""
    return text_model(
        inputs_embeds=inputs_embeds,
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        **kwargs,
    ).last_hidden_state


def no_images(*_: Any) -> Any:
    """Refuse images: `encode_images` of a family without a vision tower."""
    raise ValueError("this family has no vision tower, so that it reads no images")


def same_name(name: str, weight: "torch.Tensor") -> "Iterable[tuple[str, torch.Tensor]]":
    """Return (name, weight): `engine_names` where SGLang reads transformers' names and layouts."""
    return ((name, weight),)


def no_mixture(config: Any) -> None:
    """Return None: `mixture` of a family whose models have no mixtures of experts."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Paths are dotted paths in the transformers model. A config is transformers', of the whole model.
    Where `vision_tower` is None the family reads no images, and nothing that concerns images is
    called.
    """

    model_type: str  # as in the checkpoint's config.json
    auto_model: str = "AutoModelForImageTextToText"  # name of transformers' class that loads it
    text_model: str
    text_blocks: str
    vision_tower: str | None
    vision_blocks: str | None
    projector: tuple[str, ...]  # modules that turn the tower's patches into tokens
    #: Paths (see `submodules`) of modules that FSDP shards as separate units, inner ones first; the
    #: root's unit has all other weights.
    fsdp_units: tuple[str, ...]
    image_token: str  # the placeholder of one image token
    special_tokens: tuple[str, ...]  # vision placeholders, which may never be sampled
    #: (tokenizer, checkpoint, trust_remote_code) → ids that end a response
    stop_ids: Callable[[Any, str | Path, bool], tuple[int, ...]] = stop_ids
    #: () → by class name of a module, the `forward` that replaces the module's own
    layers: Callable[[], Mapping[str, Forward]]
    #: (ids [T], grids [n, 3], image tokens) → int64 [4, T], rows (text, t, h, w)
    positions: Callable[[np.ndarray, np.ndarray, ImageTokens], np.ndarray] = mrope_positions
    #: (text model, embeddings [1|S, T, H], positions [4, 1|S, T], positions of image tokens int64
    #: [N] or None, deepstack features, context=AttentionContext) → last hidden state [1|S, T, H]
    text_forward: "Callable[..., torch.Tensor]" = text_forward
    #: The module that `encode_images` gets; None for the vision tower. Another one has the
    #: projector beside the tower.
    image_encoder: str | None = None
    #: (image encoder, patches [P, d], grids int64 [n, 3], dtype that the tower computes in) →
    #: features
    encode_images: "Callable[[nn.Module, torch.Tensor, np.ndarray, torch.dtype], VisionFeatures]" = no_images
    #: (checkpoint, min_pixels, max_pixels) → processor; None for a bound means the checkpoint's own
    image_processor: Callable[[str | Path, int | None, int | None], ImageProcessor] = (
        images.QwenImages
    )
    #: The same for the clips of videos; None for a family that reads none.
    videos: Callable[[str | Path, int | None, int | None], VideoProcessor] | None = None
    #: config → (patches, grids) of the smallest image
    blank_image: Callable[[Any], tuple[np.ndarray, np.ndarray]] = images.blank_image
    #: Tokens of that image: one, or those of a tile.
    blank_tokens: int = 1
    #: vision config or preprocessor_config.json → side in pixels of the square of an image token
    token_side: Callable[[Mapping[str, Any]], int] = images.token_side
    #: Whether the tokens of a run of image placeholders see each other.
    images_see_themselves: bool = False
    #: config → number of tensors in `VisionFeatures`
    feature_layers: Callable[[Any], int] = shapes.feature_layers
    #: (config, whether the tower is trained) → relative costs, from which batches are planned
    prices: Callable[[Any, bool], Prices] = shapes.prices
    #: config → the tensors that an engine stores
    decode_state: Callable[[Any], DecodeState] = shapes.decode_state
    #: (name, weight) in transformers → the names and weights that SGLang loads
    engine_names: "Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]" = same_name
    #: config → per part of it, keys that SGLang reads and that transformers ignores or may lack
    engine_config: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda config: {}
    #: (content of config.json, whether the engine is on a CPU) → reasons why SGLang (0.5.23) can't
    #: run the model. An absent key has transformers' default.
    engine_limits: Callable[[Mapping[str, Any], bool], Iterable[str]] = lambda config, on_cpu: ()
    #: Whether SGLang computes by transformers' modules (`engines.sglang.models`), not by a class of
    #: its own.
    is_general_in_sglang: bool = False
    #: Whether an export has the names and layouts of checkpoints on the hub, not those in memory.
    exports_original_format: bool = False
    #: config → its mixtures of experts, None where it has none
    mixture: Callable[[Any], Mixture | None] = no_mixture
    #: Last parts of the names of weights that are float32 whatever the model's dtype: in training,
    #: in engines and in exports.
    float32_weights: tuple[str, ...] = ()
    #: First parts of the names of weights that checkpoints have and transformers' model lacks. An
    #: export has them unchanged.
    carried_weights: tuple[str, ...] = ()

    @property
    def model_class(self) -> Any:
        """The class of transformers that loads the family's models."""
        import transformers

        return getattr(transformers, self.auto_model)

    @property
    def has_mixtures(self) -> bool:
        """Whether models of the family have mixtures of experts."""
        return self.mixture is not no_mixture

    def check(self, config: Any, path: str | Path) -> None:
        """Raise ValueError unless the config of the checkpoint at `path` is of this family."""
        if config.model_type != self.model_type:
            raise ValueError(
                f"rollout.model.model_type: {self.model_type!r}, but the checkpoint at {path} is "
                f"{config.model_type!r}"
            )

    def stays_float32(self, name: str) -> bool:
        """Return whether the weight of this name is one of `float32_weights`."""
        return name.rpartition(".")[2] in self.float32_weights

    def sglang_limits(self, config: Mapping[str, Any], on_cpu: bool) -> list[str]:
        """Return the reasons of `engine_limits`, and that of any family."""
        reasons = list(self.engine_limits(config, on_cpu))
        if shapes.has_windows(config):
            reasons.append("it leaves out the sliding windows of its layers")
        return reasons

    def sglang_refusals(self, config: Mapping[str, Any], on_cpu: bool) -> list[str]:
        """Return `sglang_limits` as sentences, each with a remedy."""
        return [
            f"SGLang can't run this {self.model_type}: {reason}; set rollout.rollout_backend=torch"
            for reason in self.sglang_limits(config, on_cpu)
        ]


def submodules(model: "nn.Module", path: str) -> "list[nn.Module]":
    """Return the modules at a dotted path, in which `*` stands for every child."""
    modules = [model]
    for name in path.split("."):
        modules = [
            child
            for m in modules
            for child in (m.children() if name == "*" else [m.get_submodule(name)])
        ]
    return modules
