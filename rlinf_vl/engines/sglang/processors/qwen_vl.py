"""A processor for Qwen's vision models that takes images already processed, expanded and hashed."""

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
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from rlinf_vl.engines.sglang.messages import SentImage


class SentImages(QwenVLImageProcessor):
    """A processor that takes `SentImage`s in place of pictures: it resizes, copies and hashes
    nothing, and makes an item of each image, with the positions that the trainer has."""

    models = QwenVLImageProcessor.models

    async def process_mm_data_async(
        self,
        image_data: Sequence[dict[str, Any]],
        input_text: Sequence[int],
        request_obj: Any,
        *_: Any,
        **__: Any,
    ) -> MultimodalProcessorOutput:
        """Return the request's items and positions.

        Args:
            image_data: one entry, with all images of the request and the positions of its ids.
            input_text: its ids, placeholders expanded.
        """
        (entry,) = image_data
        ids, items = list(input_text), []
        images: list[SentImage] = entry["images"]
        for image in images:
            grid_key = "video_grid_thw" if image.is_clip else "image_grid_thw"
            # A clip's temporal patches are grids of their own: SGLang's Qwen2.5-VL lets patches
            # attend to the whole grid, transformers to their frame.
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
        # SGLang's own have no times of clips, and place the text after one differently.
        positions = torch.from_numpy(entry["positions"])
        delta = positions[:, -1:].max(dim=0, keepdim=True).values + 1 - len(ids)
        return MultimodalProcessorOutput(
            input_ids=ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, items),
            mm_items=items,
            im_start_id=self.vision_start_token_id,
            im_end_id=self.vision_end_token_id,
            im_token_id=self.mm_tokens.image_token_id,
            video_token_id=self.mm_tokens.video_token_id,
            mrope_positions=positions,
            mrope_position_delta=delta,
        )
