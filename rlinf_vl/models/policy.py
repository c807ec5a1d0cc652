"""A packed row through a vision-language model: images to features, features into the embeddings, text layers, logprobs.

The trainer and the torch engine's prefill share `hidden_states`, so they can't disagree on how a prompt is fed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rlinf_vl.models.attention import AttentionContext, SegmentAttention
from rlinf_vl.models.families import Family
from rlinf_vl.models.logprobs import token_logprobs
from rlinf_vl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class VisionInputs:
    """The image part of a packed row on its device; see `MicroBatch` for the fields."""

    pixel_values: torch.Tensor
    grids: torch.Tensor
    image_positions: torch.Tensor
    image_features: torch.Tensor


def vision_inputs(
    pixel_values: np.ndarray, grids: np.ndarray, positions: np.ndarray, features: np.ndarray, device: torch.device
) -> VisionInputs:
    return VisionInputs(
        *(torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (pixel_values, grids, positions, features))
    )


def blank_vision(tower: nn.Module, device: torch.device) -> VisionInputs:
    """The smallest image there is, standing at no position: keeps a rank without images in step with the others."""
    config, merge = tower.config, tower.config.spatial_merge_size
    patch_dim = config.in_channels * config.temporal_patch_size * config.patch_size**2
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return VisionInputs(
        torch.zeros(merge * merge, patch_dim, device=device),
        torch.tensor([[1, merge, merge]], device=device),
        none,
        none,
    )


def hidden_states(
    model: nn.Module,
    family: Family,
    ids: torch.Tensor,
    positions: torch.Tensor,
    vision: VisionInputs | None,
    context: AttentionContext,
) -> torch.Tensor:
    """Last hidden states of one packed row.

    Args:
        model: a transformers model of `family` (see `load_model`).
        ids: int64 [T].
        positions: int64 [4, T].
        vision: images of the row, if the vision tower is to be called.
        context: how the row attends.

    Returns:
        [T, H] in the model's compute dtype.
    """
    text_model = model.get_submodule(family.text_model)
    embeds = text_model.get_input_embeddings()(ids)
    image_mask, deepstack = None, ()
    if vision is not None:
        tower = model.get_submodule(family.vision_tower)
        trained = any(p.requires_grad for p in tower.parameters())
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            features = family.encode_images(tower, vision.pixel_values, vision.grids)
        if len(vision.image_positions):
            embeds = embeds.index_put(
                (vision.image_positions,), features.tokens[vision.image_features].to(embeds.dtype)
            )
            image_mask = torch.zeros(1, len(ids), dtype=torch.bool, device=ids.device)
            image_mask[0, vision.image_positions] = True
            deepstack = tuple(layer[vision.image_features] for layer in features.deepstack)
        elif trained:
            # A zero that hangs on the tower: its backward runs, and its collectives with it.
            embeds = embeds + 0.0 * (features.tokens.sum() + sum(layer.sum() for layer in features.deepstack))
    return family.text_forward(
        text_model, embeds.unsqueeze(0), positions.unsqueeze(1), image_mask, deepstack, context=context
    )[0]


class PolicyModel(nn.Module):
    """A transformers model that answers a `MicroBatch` with per-token logprobs and entropies.

    FSDP wraps this module as its root, so the output embedding is whole while the head runs.
    """

    def __init__(self, model: nn.Module, family: Family, banned: np.ndarray, *, temperature: float, chunk: int) -> None:
        """`banned`: bool [V], ids the sampler never draws; `temperature`: the sampler's; `chunk`: positions per head chunk."""
        super().__init__()
        self.model = model
        self.family = family
        self.temperature = temperature
        self.chunk = chunk
        self.register_buffer("banned", torch.from_numpy(banned), persistent=False)

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropy), float32 [R], of the batch's response tokens."""
        device = self.banned.device
        ids, positions, predict, targets = (
            torch.from_numpy(a).to(device) for a in (batch.ids, batch.positions, batch.predict, batch.targets)
        )
        vision = None
        if batch.pixel_values is not None:
            vision = vision_inputs(batch.pixel_values, batch.grids, batch.image_positions, batch.image_features, device)
        elif batch.run_vision:
            vision = blank_vision(self.model.get_submodule(self.family.vision_tower), device)
        context = SegmentAttention(batch.cu_seqlens, device)
        hidden = hidden_states(self.model, self.family, ids, positions, vision, context)
        weight = self.model.get_output_embeddings().weight
        return token_logprobs(
            hidden[predict], weight, targets, temperature=self.temperature, banned=self.banned, chunk=self.chunk
        )
