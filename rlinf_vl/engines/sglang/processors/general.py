"""A processor for models of the general path that takes images and positions as they are."""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from rlinf_vl.engines.sglang.models.general import RlinfVlGeneral
from rlinf_vl.engines.sglang.processors.items import items_of, sent_positions
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
        """Return the request's items and positions.

        Args:
            image_data: one entry, with all images of the request, and positions int64 [3, T].
            input_text: its ids, placeholders expanded.
        """
        (entry,) = image_data
        ids, items = list(input_text), items_of(entry["images"])
        positions, delta = sent_positions(entry, len(ids))
        return MultimodalProcessorOutput(
            input_ids=ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, items),
            mm_items=items,
            im_token_id=image_token_id(self.hf_config),
            mrope_positions=positions,
            mrope_position_delta=delta,
        )
