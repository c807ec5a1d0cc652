"""From pixels to the tokens of images by transformers' own modules: `Family.encode_images` of the
general path.

Each function takes a module, rows of pixels [P, d], grids int64 [n, 3] and the dtype to compute in.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.transfer import on_device


def encode_images(
    tower: nn.Module, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype
) -> VisionFeatures:
    """Run a tower that has its projector within on patches and grids alone."""
    out = tower(patches.to(dtype), grid_thw=_on_device_of(patches, grids))
    return VisionFeatures(out.pooler_output, tuple(getattr(out, "deepstack_features", ())))


def encode_patches(
    owner: Any, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype
) -> VisionFeatures:
    """Run a tower and the projector beside it on patches."""
    return _features(
        owner, pixel_values=patches.to(dtype), image_grid_thw=_on_device_of(patches, grids)
    )


def encode_square_patches(
    owner: Any, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype
) -> VisionFeatures:
    """Run `encode_patches` of a tower that takes patches as [P, 3, side, side]."""
    return encode_patches(owner, squares(patches), grids, dtype)


def encode_tiles(
    owner: Any, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype
) -> VisionFeatures:
    """Run a tower and the projector beside it on tiles, [tiles, 3 · side²]."""
    return _features(owner, pixel_values=squares(patches.to(dtype)))


def encode_unpadded_tiles(
    owner: Any, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype
) -> VisionFeatures:
    """Run `encode_tiles` of a model that takes the tiles of a prompt, and those of zeros for padding.

    A blank image is no padding: the first number of a tile is moved by what no sum can show.
    """
    tiles = patches.to(dtype)
    first = tiles[:, :1]
    first = torch.where(first == 0, torch.finfo(dtype).tiny, first)
    tiles = squares(torch.cat([first, tiles[:, 1:]], dim=1))
    return _features(owner, pixel_values=tiles.unsqueeze(0))


def squares(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of pixels [N, 3 · side²] as [N, 3, side, side]."""
    side = math.isqrt(rows.shape[1] // 3)
    return rows.view(-1, 3, side, side)


def _on_device_of(patches: torch.Tensor, grids: np.ndarray) -> torch.Tensor:
    """Return the grids on the device of the patches; of `meta` patches, on the CPU."""
    return on_device(grids, "cpu" if patches.is_meta else patches.device)


def _features(owner: Any, **inputs: torch.Tensor) -> VisionFeatures:
    """Return [N, H] features, which some models return by image or by tile."""
    output = owner.get_image_features(**inputs, return_dict=True).pooler_output
    parts = output if isinstance(output, (list, tuple)) else [output]
    return VisionFeatures(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
