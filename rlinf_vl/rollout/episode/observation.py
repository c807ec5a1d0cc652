"""Checks an environment's messages, images and step results, and converts them to plain forms."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vl.config.parts import load_part
from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.clips import is_clip
from rlinf_vl.data.corruption import Shown
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.data.unusable import PROMPT_UNUSABLE, ImageError
from rlinf_vl.data.video_files import is_video_name
from rlinf_vl.envs import StepResult
from rlinf_vl.types import IMAGE_URL_PREFIX, ImageRef, Message, Problem

_DEFAULT_VIDEO = VideoConfig()
#: Limit on the pixel bytes of an image whose encoded PNG is cached.
SMALL = 2**15


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages and their images, in one form.

    In the messages each image is a part
    {"type": "image_url", "image_url": {"url": "image://<hash>"}}, and each video one of type
    "video_url" alike.

    Attributes:
        images: the images and clips in the order of their parts.
        tools: OpenAI's descriptions of functions, for the chat template; a conversation's first
            observation has them.
    """

    messages: tuple[Message, ...]
    images: tuple[ImageRef, ...]
    tools: tuple[dict[str, Any], ...] = ()


def observe(
    messages: Iterable[Message],
    problem: Problem,
    corrupted_images: Shown | None = None,
    video: VideoConfig = _DEFAULT_VIDEO,
    tools: tuple[dict[str, Any], ...] = (),
) -> Observation:
    """Convert an environment's messages to an observation.

    Args:
        messages: show images and videos of the problem by address, and new ones as arrays or in any
            form that `to_image_ref` or `to_clip_ref` takes; the path of a video is any of this
            machine, as the environment is the user's code.
        corrupted_images: the images to show in place of these.
        video: data.video.
        tools: as in `Observation`.

    Raises:
        ImageError: an image or a video can't be used.
        Exception: a message is malformed.
    """
    problem_images = {image.url: image for image in problem.images}
    images: list[ImageRef] = []

    def plain_part(part: Any) -> Any:
        noun = _noun(part)
        if noun is None:
            return part
        value = part.get(f"{noun}_url", part.get(noun))
        value = value["url"] if isinstance(value, dict) and "url" in value else value
        if isinstance(value, str) and value.startswith(IMAGE_URL_PREFIX):
            if value not in problem_images:
                raise ImageError(PROMPT_UNUSABLE, f"{value} is no {noun} of the problem")
            image = problem_images[value]
            noun = "video" if is_clip(image) else "image"
        elif noun == "video":
            image = _clip(value, part.get("fps"), video)
        elif isinstance(value, np.ndarray):
            image = image_of_array(value)
        else:
            image = to_image_ref(value, root=None)
        images.append(corrupted_images(image) if corrupted_images else image)
        return {"type": f"{noun}_url", f"{noun}_url": {"url": images[-1].url}}

    plain_messages = tuple(
        message | {"content": list(map(plain_part, message["content"]))}
        if isinstance(message["content"], (list, tuple))
        else message
        for message in messages
    )
    return Observation(plain_messages, tuple(images), tools)


def _noun(part: Any) -> str | None:
    """Return "image" or "video" for a part that shows one; None for any other."""
    for noun in ("image", "video"):
        names = (noun, f"{noun}_url")
        if part.get("type") in names or any(name in part for name in names):
            return noun
    return None


def _clip(value: Any, fps: Any, video: VideoConfig) -> ImageRef:
    """Return the clip of a video that an environment shows; `fps`: of a list of frames."""
    if isinstance(value, (list, tuple)) and fps is not None:
        value = {"frames": value, "fps": fps}
    if isinstance(value, Path) or isinstance(value, str) and is_video_name(value):
        value = os.path.abspath(value)
    return load_part("clip")(value, root=Path("/"), settings=video)


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


def portable_result(result: StepResult) -> StepResult:
    """Check a step's result, and return it with an `info` of plain types for another process.

    `plain_result` makes the same of it there.

    Raises:
        Exception: as `plain_result`.
    """
    plain = plain_result(result)
    info = dict(plain.info)
    facts = json.loads(info.pop("facts") or "{}")
    if info["answer"] is not None:
        info["answer"] = str.__str__(info["answer"])
    return replace(plain, info=info | facts)


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
