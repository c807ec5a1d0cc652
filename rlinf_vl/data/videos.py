"""Detection of videos in rows and files; they are not supported and refused."""

from collections.abc import Collection
from typing import Any

from rlinf_vl.data.unusable import shorten

#: The kind under which such a row or image is counted, and the message about it.
VIDEO = "video"
NO_VIDEOS = "videos are not supported; give frames as images, or leave it out"
PLACEHOLDER = "<video>"
#: The names of columns of videos in the data sets of other systems.
COLUMNS = ("videos", "video")
NAMES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv")


def video_in(row: dict[str, Any], prompt_key: str, image_keys: Collection[str]) -> str | None:
    """Return an error message that names the place of a row's video; None without a video.

    A video may stand in a column, in a text or in a part of a message.
    """
    for column in COLUMNS:
        if row.get(column) and column not in image_keys:
            return f"column {column!r} holds {shorten(repr(row[column]))}: {NO_VIDEOS}"
    prompt = row.get(prompt_key)
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    for part in (
        part
        for content in contents
        for part in (content if isinstance(content, list) else [content])
    ):
        if isinstance(part, dict) and is_video_part(part):
            return f"column {prompt_key!r}: content part {shorten(repr(part))}: {NO_VIDEOS}"
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str) and PLACEHOLDER in text:
            return f"column {prompt_key!r} has a {PLACEHOLDER}: {NO_VIDEOS}"
    return None


def is_video_part(part: dict[str, Any]) -> bool:
    """Return whether a part of a message's content is a video or its placeholder."""
    # In a table, all parts have the keys of all kinds: only a value that is not None counts.
    return "video" in str(part.get("type")) or any(
        part.get(key) is not None for key in ("video", "video_url")
    )


def is_video(begin: bytes) -> bool:
    """Return whether a file is a video, by its first twelve bytes.

    It knows MP4 and QuickTime (AVIF and HEIC images use the same container), Matroska and AVI.
    """
    container = begin[4:8] == b"ftyp" and begin[8:11] not in (
        b"avi",
        b"hei",
        b"hev",
        b"mif",
        b"msf",
    )
    return container or begin.startswith(b"\x1aE\xdf\xa3") or begin[:4] + begin[8:11] == b"RIFFAVI"
