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
    nothing, and makes an item of each image."""

    models = QwenVLImageProcessor.models

    async def process_mm_data_async(
        self,
        image_data: Sequence[dict[str, list[SentImage]]],
        input_text: Sequence[int],
        request_obj: Any,
        *_: Any,
        **__: Any,
    ) -> MultimodalProcessorOutput:
        """Return the request's items and positions.

        Args:
            image_data: one entry, with all images of the request.
            input_text: its ids, placeholders expanded.
        """
        (entry,) = image_data
        ids, items = list(input_text), []
        for image in entry["images"]:
            item = MultimodalDataItem(
                modality=Modality.IMAGE,
                offsets=[image.run],
                feature=image.patches,
                format=MultimodalInputFormat.PROCESSOR_OUTPUT,
                model_specific_data={"image_grid_thw": torch.tensor([image.grid])},
            )
            item.set_identity(image.identity)
            items.append(item)
        positions, delta = self.compute_mrope_positions(ids, items)
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
