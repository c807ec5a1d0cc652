"""Images that are already processed, expanded and hashed, as SGLang's items."""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
)

from rlinf_vl.engines.sglang.messages import SentImage


def items_of(images: Sequence[SentImage]) -> list[MultimodalDataItem]:
    """Return an item of each image; nothing is resized, copied or hashed."""
    items = []
    for image in images:
        grid_key = "video_grid_thw" if image.is_clip else "image_grid_thw"
        # A clip's temporal patches are grids of their own: SGLang's Qwen2.5-VL lets patches attend
        # to the whole grid, transformers to their frame.
        t, h, w = image.grid
        item = MultimodalDataItem(
            modality=Modality.VIDEO if image.is_clip else Modality.IMAGE,
            offsets=image.runs,
            feature=image.patches,
            format=MultimodalInputFormat.PROCESSOR_OUTPUT,
            model_specific_data={grid_key: torch.tensor([[1, h, w]] * t)},
        )
        item.set_identity(image.identity)
        items.append(item)
    return items


def sent_positions(entry: dict[str, Any], n_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the trainer's positions [3, T], and what is added to the number of a later token.

    SGLang's own have no times of clips, and place the text after one differently.
    """
    positions = torch.from_numpy(entry["positions"])
    return positions, positions[:, -1:].max(dim=0, keepdim=True).values + 1 - n_ids
