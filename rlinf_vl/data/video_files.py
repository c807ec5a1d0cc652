"""Detection of video files by their names and first bytes."""

#: Suffixes of video files.
NAMES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv")
#: The kind under which a video among images is counted, and the hint in its message.
MISPLACED = "video among images"
HINT = "name its column in data.video_keys, and mark it in the prompt with <video>"


def is_video_name(name: str) -> bool:
    """Return whether a path or URL is that of a video, by its suffix."""
    return name.lower().endswith(NAMES)


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
