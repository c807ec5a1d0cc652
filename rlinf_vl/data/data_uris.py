"""Images and clips as data URIs: the form in which rows go to agents and to task apps."""

import base64
from collections.abc import Mapping

from rlinf_vl.data.clips import is_clip
from rlinf_vl.types import ImageRef, Message, Problem

#: Image format by the first bytes of a file; PNG for any other.
_MEDIA_TYPES = {b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}
#: Media type of a video's sampled frames and times, which are passed on as they are.
CLIP_TYPE = "video/x-rlinf-vl-clip"


def data_uri(image: ImageRef) -> str:
    """Return the bytes of an image, or of a clip, as a data URI."""
    data = bytes(image.data)
    if is_clip(image):
        return f"data:{CLIP_TYPE};base64,{base64.b64encode(data).decode()}"
    kind = next((kind for start, kind in _MEDIA_TYPES.items() if data.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def messages_with_data(problem: Problem) -> list[Message]:
    """Return a problem's messages, images and clips as data URIs of their original bytes."""
    # The original bytes: so an image that comes back is the row's, by its hash.
    uris = {image.url: data_uri(image) for image in problem.images}
    return [_with_uris(message, uris) for message in problem.messages]


def _with_uris(message: Message, uris: Mapping[str, str]) -> Message:
    """Return a message with the addresses of images replaced."""
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        kind = part.get("type")
        if kind in ("image_url", "video_url"):
            part = part | {kind: {"url": uris[part[kind]["url"]]}}
        parts.append(part)
    return message | {"content": parts}
