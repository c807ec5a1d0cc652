"""Checks an environment's messages, images and step results, and converts them to plain forms."""

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

#: Limit on the pixel bytes of an image whose encoded PNG is cached.
SMALL = 2**15


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages and their images, in one form.

    In the messages each image is a part
    {"type": "image_url", "image_url": {"url": "image://<hash>"}}.

    Attributes:
        images: the images in the order of their parts.
        tools: OpenAI's descriptions of functions, for the chat template; a conversation's first
            observation has them.
    """

    messages: tuple[Message, ...]
    images: tuple[ImageRef, ...]
    tools: tuple[dict[str, Any], ...] = ()


def observe(
    messages: Iterable[Message], problem: Problem, corrupted_images: Shown | None = None
) -> Observation:
    """Convert an environment's messages to an observation.

    Args:
        messages: show images of the problem by address, and new ones as arrays or in any form
            that `to_image_ref` takes.
        corrupted_images: the images to show in place of these.

    Raises:
        ImageError: an image can't be used.
        Exception: a message is malformed.
    """
    problem_images = {image.url: image for image in problem.images}
    images: list[ImageRef] = []

    def plain_part(part: Any) -> Any:
        if is_video_part(part):
            raise ImageError(
                VIDEO, f"a content part of type {part.get('type', 'video')!r}: {NO_VIDEOS}"
            )
        if (
            "image" not in part
            and "image_url" not in part
            and part.get("type") not in ("image", "image_url")
        ):
            return part
        value = part.get("image_url", part.get("image"))
        value = value["url"] if isinstance(value, dict) and "url" in value else value
        if isinstance(value, str) and value.startswith(IMAGE_URL_PREFIX):
            if value not in problem_images:
                raise ImageError(PROMPT_UNUSABLE, f"{value} is no image of the problem")
            image = problem_images[value]
        elif isinstance(value, np.ndarray):
            image = image_of_array(value)
        else:
            image = to_image_ref(value, root=None)
        images.append(corrupted_images(image) if corrupted_images else image)
        return {"type": "image_url", "image_url": {"url": images[-1].url}}

    plain_messages = tuple(
        message | {"content": list(map(plain_part, message["content"]))}
        if isinstance(message["content"], (list, tuple))
        else message
        for message in messages
    )
    return Observation(plain_messages, tuple(images))


def plain_result(result: StepResult) -> StepResult:
    """Check a step's result, and return it with plain types.

    The returned reward is a finite float. The returned `info` has the keys of which a trajectory
    is made: correct (bool), reward_parts and metrics (finite floats by name), facts (str, as
    `Turn.info`) and answer (str or None).

    Raises:
        Exception: a value is of another type, or a number is not finite.
    """
    # Users write numpy's numbers and flags, which no JSON and no comparison of types knows.
    info: Mapping[str, Any] = result.info
    reward_parts = _floats(info.get("reward_parts", {}))
    metrics = _floats(info.get("metrics", {}))
    reward = float(result.reward)
    for name, value in [("reward", reward), *reward_parts.items(), *metrics.items()]:
        if not math.isfinite(value):
            raise ValueError(f"it gave {name} {value}")
    if not isinstance(info.get("state", ""), str):
        raise TypeError(f"it gave the state {info['state']!r}, which is no string")
    if not isinstance(info.get("answer"), str | None):
        raise TypeError(f"it gave the answer {info['answer']!r}, which is no string")
    # Those two only: whatever else an environment says of a turn nobody reads.
    facts = {name: info[name] for name in ("tool_calls", "state") if name in info}
    plain_info = {
        "reward_parts": reward_parts,
        "metrics": metrics,
        "correct": bool(info.get("correct", False)),
        "facts": json.dumps(facts) if facts else "",
        "answer": info.get("answer"),
    }
    return replace(result, reward=reward, done=bool(result.done), info=plain_info)


def _floats(numbers: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in dict(numbers).items()}


def image_of_array(pixels: np.ndarray) -> ImageRef:
    """Encode an array, uint8 [H, W, 3] for example, as a PNG.

    Small ones are cached: games draw small images, and often the same ones.
    """
    if pixels.nbytes <= SMALL and pixels.dtype == np.uint8:
        return _small_image(pixels.tobytes(), pixels.shape)
    return to_image_ref(Image.fromarray(pixels), root=None)


@lru_cache(1024)
def _small_image(pixels: bytes, shape: tuple[int, ...]) -> ImageRef:
    return to_image_ref(Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(shape)), root=None)
