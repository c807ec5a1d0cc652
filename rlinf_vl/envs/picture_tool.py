"""An environment with tools to look closer at the pictures of a problem."""

import math

from PIL import Image

from rlinf_vl.data.images import decode
from rlinf_vl.envs.tool import ToolEnv

#: Smallest side of a part shown, in pixels: the Qwen-VL families make one token of it.
MIN_SIDE = 32
#: Greatest ratio of the longer to the shorter side of a part shown.
MAX_ASPECT_RATIO = 100


# The docstrings of tools are part of the prompt: rewording or wrapping one changes what models see.
class PictureTool(ToolEnv):
    """An environment graded like `single_turn`, in which the policy may look at parts of the
    pictures first."""

    def crop(self, box: list[float], picture: int = 1) -> Image.Image:
        """Show a part of a picture of the question.

        Args:
            box: The part's [left, top, right, bottom], from 0 (the picture's left or top edge) to 1000 (its right or bottom edge)
            picture: Which picture, counted from 1
        """
        full_picture = self._picture(picture)
        return full_picture.crop(_pixels(box, *full_picture.size))

    def zoom(self, box: list[float], picture: int = 1) -> Image.Image:
        """Show a part of a picture of the question, enlarged as far as the whole picture's size allows.

        Args:
            box: The part's [left, top, right, bottom], from 0 (the picture's left or top edge) to 1000 (its right or bottom edge)
            picture: Which picture, counted from 1
        """
        full_picture = self._picture(picture)
        part = full_picture.crop(_pixels(box, *full_picture.size))
        scale = min(full_picture.width / part.width, full_picture.height / part.height)
        return part.resize(
            (round(part.width * scale), round(part.height * scale)), Image.Resampling.LANCZOS
        )

    def _picture(self, number: int) -> Image.Image:
        images = self.problem.images
        if not 1 <= number <= len(images):
            raise ValueError(f"picture: {number} is none of the question's {len(images)}")
        # Counted from 1, as prompts speak of the first picture.
        return decode(images[number - 1])


def _pixels(box: list[float], width: int, height: int) -> tuple[int, int, int, int]:
    """Convert a box in thousandths to (left, top, right, bottom) in pixels.

    The box is cut to the picture and enlarged to the smallest size shown.

    Raises:
        ValueError: it is no box, or lies outside the picture.
    """
    if len(box) != 4:
        raise ValueError(f"box: {len(box)} numbers are not [left, top, right, bottom]")
    left, top, right, bottom = (min(max(value, 0), 1000) / 1000 for value in box)
    if left >= right or top >= bottom:
        raise ValueError(
            f"box: {box} holds no part of the picture; left < right and top < bottom lie within 0 "
            "… 1000"
        )
    # Processors refuse a picture that is narrower, or longer for its width.
    shortest = max(MIN_SIDE, math.ceil(max(width, height) / MAX_ASPECT_RATIO))
    (x, w), (y, h) = _span(left, right, width, shortest), _span(top, bottom, height, shortest)
    return x, y, x + w, y + h


def _span(begin: float, end: float, length: int, shortest: int) -> tuple[int, int]:
    """Return (first pixel, number of pixels) of the share `begin` … `end` of `length` pixels.

    The number is at least `shortest`, or `length` if that is smaller.
    """
    first, last = math.floor(begin * length), math.ceil(end * length)
    n = max(last - first, min(shortest, length))
    # Grow around the middle, but stay inside the picture.
    return min(max((first + last - n) // 2, 0), length - n), n
