"""Placeholders of images in rendered prompts: one of each picture, and those of the clips of videos."""

from collections.abc import Iterator, Sequence

import numpy as np

from rlinf_vl.data.clips import is_clip
from rlinf_vl.models.processing import Processor
from rlinf_vl.types import ImageRef, Message


def with_video_parts(message: Message) -> Message:
    """Return a message with its videos as chat templates know them: parts of type video."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "video", "video": part["video_url"]["url"]} if "video_url" in part else part
        for part in content
    ]
    return message | {"content": parts}


def with_video_texts(processor: Processor, rendered: str, clips: Iterator[ImageRef]) -> str:
    """Replace the placeholders of clips in a rendered text by their texts, such as times."""
    first, *further_texts = rendered.split(processor.video_token)
    pieces = [first]
    for text in further_texts:
        clip = next(clips, None)
        # A placeholder without a clip stays, and is counted later.
        pieces += [processor.video_token if clip is None else processor.video_text(clip), text]
    return "".join(pieces)


def expand_images(
    processor: Processor, ids: Sequence[int], images: Sequence[ImageRef]
) -> tuple[np.ndarray, np.ndarray]:
    """Replace the image placeholders among the ids by the images' ids.

    There is one placeholder of each picture, and one of each run of a clip.

    Returns:
        (ids int32 [P], the number of them that each of `ids` became, int64).

    Raises:
        ValueError: the placeholders are not those of the images, in their order.
    """
    rendered, tokens = np.asarray(ids, np.int32), processor.image_tokens
    image_ids: list[np.ndarray] = []
    placeholder_ids: list[int] = []
    for image in images:
        runs = processor.image_ids(image)
        image_ids += runs
        placeholder_ids += [tokens.placeholder_of(image)] * len(runs)
    if rendered[tokens.mask(rendered)].tolist() != placeholder_ids:
        n_images, n_clips = len(images), sum(map(is_clip, images))
        n_placeholders = int((rendered == tokens.id).sum())
        counts = f"{n_placeholders} {processor.family.image_token} for {n_images - n_clips} images"
        if n_clips:
            n_placeholders = int((rendered == tokens.video_id).sum())
            counts += (
                f", {n_placeholders} {processor.video_token} for {n_clips} videos, which take "
                f"{placeholder_ids.count(tokens.video_id)}"
            )
        raise ValueError(
            f"the rendered prompt holds {counts}: the messages do not show each image once and in "
            "order, or the chat template does not render them"
        )
    return tokens.expand(rendered, image_ids)
