"""A processor for Qwen's vision models that takes images already processed, expanded and hashed."""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from rlinf_vl.engines.sglang.processors.items import processed


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
        """Return `processed` of these."""
        return processed(
            image_data,
            input_text,
            im_start_id=self.vision_start_token_id,
            im_end_id=self.vision_end_token_id,
            im_token_id=self.mm_tokens.image_token_id,
            video_token_id=self.mm_tokens.video_token_id,
        )
