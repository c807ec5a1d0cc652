"""What an environment says, checked and in plain form: its messages and images, and the facts of a step."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vl.data.corruption import Shown
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.data.unusable import PROMPT_UNUSABLE, ImageError
from rlinf_vl.data.videos import NO_VIDEOS, VIDEO, is_video_part
from rlinf_vl.envs import StepResult
from rlinf_vl.types import IMAGE_URL_PREFIX, ImageRef, Message, Problem

#: Bytes of a picture's pixels up to which it is kept as it was encoded.
SMALL = 2**15


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages in which each image is a part {"type": "image_url", "image_url": {"url": "image://<hash>"}}, and those images."""

    messages: tuple[Message, ...]
    images: tuple[ImageRef, ...]


def observe(messages: Iterable[Message], problem: Problem, shown: Shown | None = None) -> Observation:
    """Messages with images in any form: the problem's, by address, or new ones as arrays or as `to_image_ref` takes them; with
    `shown`, what that shows in place of each.

    Raises:
        ImageError: an image can't be used.
        Exception: they are no messages.
    """
    known = {image.url: image for image in problem.images}
    images: list[ImageRef] = []

    def plain_part(part: Any) -> Any:
        if is_video_part(part):
            raise ImageError(VIDEO, f"a content part of type {part.get('type', 'video')!r}: {NO_VIDEOS}")
        if "image" not in part and "image_url" not in part and part.get("type") not in ("image", "image_url"):
            return part
        value = part.get("image_url", part.get("image"))
        value = value["url"] if isinstance(value, dict) and "url" in value else value
        if isinstance(value, str) and value.startswith(IMAGE_URL_PREFIX):
            if value not in known:
                raise ImageError(PROMPT_UNUSABLE, f"{value} is no image of the problem")
            image = known[value]
        else:
            image = _picture(value) if isinstance(value, np.ndarray) else to_image_ref(value, root=None)
        images.append(shown(image) if shown else image)
        return {"type": "image_url", "image_url": {"url": images[-1].url}}

    plain = tuple(
        message | {"content": list(map(plain_part, message["content"]))}
        if isinstance(message["content"], (list, tuple))
        else message
        for message in messages
    )
    return Observation(plain, tuple(images))


def checked(result: StepResult) -> StepResult:
    """The same with a finite reward, and in `info` what a trajectory keeps: correct (bool), reward_parts and metrics (finite floats
    by name), facts (str): `Turn.info`, and answer (str or None).

    Raises:
        Exception: something in it is of another kind.
    """
    info: Mapping[str, Any] = result.info
    numbers = {
        kind: {str(name): float(value) for name, value in dict(info.get(kind, {})).items()}
        for kind in ("reward_parts", "metrics")
    }
    reward = float(result.reward)
    for name, value in (("reward", reward), *(pair for found in numbers.values() for pair in found.items())):
        if not math.isfinite(value):
            raise ValueError(f"it gave {name} {value}")
    if not isinstance(info.get("state", ""), str):
        raise TypeError(f"it gave the state {info['state']!r}, which is no string")
    if not isinstance(info.get("answer"), str | None):
        raise TypeError(f"it gave the answer {info['answer']!r}, which is no string")
    facts = {name: info[name] for name in ("tool_calls", "state") if name in info}
    kept = {**numbers, "correct": bool(info.get("correct", False)), "facts": json.dumps(facts) if facts else ""}
    kept["answer"] = info.get("answer")
    return replace(result, reward=reward, done=bool(result.done), info=kept)


def _picture(pixels: np.ndarray) -> ImageRef:
    """An array as a PNG. Games draw small pictures, and often the same ones."""
    if pixels.nbytes <= SMALL and pixels.dtype == np.uint8:
        return _small_picture(pixels.tobytes(), pixels.shape)
    return to_image_ref(Image.fromarray(pixels), root=None)


@lru_cache(1024)
def _small_picture(pixels: bytes, shape: tuple[int, ...]) -> ImageRef:
    return to_image_ref(Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(shape)), root=None)
