"""A processor for models of the general path that takes images and positions as they are."""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from rlinf_vl.engines.sglang.models.general import RlinfVlGeneral
from rlinf_vl.engines.sglang.processors.items import processed
from rlinf_vl.models.image_tokens import image_token_id


class SentWithPositions(BaseMultimodalProcessor):
    """A processor that takes `SentImage`s, and positions from the family."""

    models = [RlinfVlGeneral]

    async def process_mm_data_async(
        self,
        image_data: Sequence[dict[str, Any]],
        input_text: Sequence[int],
        *_: Any,
        **__: Any,
    ) -> MultimodalProcessorOutput:
        """Return `processed` of these."""
        return processed(image_data, input_text, im_token_id=image_token_id(self.hf_config))
