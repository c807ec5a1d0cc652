"""Clips as files that every viewer plays: animated PNGs, which note the time of each frame."""

import io
import json
from itertools import pairwise

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rlinf_vl.data.clips import clip_of
from rlinf_vl.types import ImageRef

#: Key of the text in the file: JSON, [index of the picture, seconds] for each frame.
_KEY = "clip"
#: Milliseconds for which a picture is shown at most, and the last one.
_LONGEST_MS, _LAST_MS = 2000, 1000


def animated(clip: ImageRef) -> bytes:
    """Return a clip as an animated PNG with exactly its pixels.

    Pauses of more than two seconds are shortened; the frames' true times are noted in it.
    """
    parsed = clip_of(clip)
    pictures: list[Image.Image] = []
    starts: list[float] = []
    noted = []
    for frame, seconds in zip(parsed.frames, parsed.timestamps, strict=True):
        picture = Image.open(io.BytesIO(frame)).convert("RGB")
        # An encoder joins a picture to an equal one before it.
        if not pictures or picture.tobytes() != pictures[-1].tobytes():
            pictures.append(picture)
            starts.append(seconds)
        noted.append([len(pictures) - 1, seconds])
    durations = [
        min(_LONGEST_MS, max(1, round(1000 * (end - start)))) for start, end in pairwise(starts)
    ]
    text = PngInfo()
    text.add_text(_KEY, json.dumps(noted))
    file = io.BytesIO()
    pictures[0].save(
        file,
        "PNG",
        pnginfo=text,
        save_all=True,
        append_images=pictures[1:],
        duration=[*durations, _LAST_MS],
        loop=0,
    )
    return file.getvalue()


def frames_of(image: Image.Image) -> list[tuple[Image.Image, float]]:
    """Return the frames and their seconds of a file of `animated`; [] for any other picture."""
    noted = image.info.get(_KEY) if image.format == "PNG" else None
    if noted is None:
        return []
    frames = []
    try:
        for number, seconds in json.loads(noted):
            image.seek(number)
            frames.append((image.convert("RGB"), float(seconds)))
    except (ValueError, TypeError, EOFError):  # a text of another program's
        return []
    return frames
