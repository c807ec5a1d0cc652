"""A processor for Qwen's vision models that takes images already processed, expanded and hashed."""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from rlinf_vl.engines.sglang.processors.items import items_of, sent_positions


class SentImages(QwenVLImageProcessor):
    """A processor that takes `SentImage`s in place of pictures, and the trainer's positions."""

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
        ids, items = list(input_text), items_of(entry["images"])
        positions, delta = sent_positions(entry, len(ids))
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
