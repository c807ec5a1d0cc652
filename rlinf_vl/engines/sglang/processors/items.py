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
    MultimodalProcessorOutput,
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


def processed(
    image_data: Sequence[dict[str, Any]], input_text: Sequence[int], **token_ids: int
) -> MultimodalProcessorOutput:
    """Return a request's ids, items and positions.

    Positions are the trainer's: SGLang's own have no times of clips, and place the text after one
    differently.

    Args:
        image_data: one entry, with all images of the request, and the positions of its ids, int64
            [3, T].
        input_text: its ids, placeholders expanded.
        token_ids: of the processor, by SGLang's names.
    """
    (entry,) = image_data
    ids, items = list(input_text), items_of(entry["images"])
    positions = torch.from_numpy(entry["positions"])
    return MultimodalProcessorOutput(
        input_ids=ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, items),
        mm_items=items,
        mrope_positions=positions,
        # What is added to the number of a later token.
        mrope_position_delta=positions[:, -1:].max(dim=0, keepdim=True).values + 1 - len(ids),
        **token_ids,
    )
