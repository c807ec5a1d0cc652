"""A trajectory as a conversation: who said what, and which image stands where.

It is read off the token ids: only a special token ends a message or names who speaks, whatever a text spells.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlinf_vl.types import TokenSequence, Turn

ROLES = "system|developer|user|assistant|model|tool|observation|environment"
_SPEAKER = re.compile(rf"({ROLES})(?:\n|$)")
_NAMED = re.compile(rf"\W*({ROLES})\W*")


def messages(
    sequence: TokenSequence,
    turns: Mapping[int, Turn],
    numbers: Mapping[str, int],
    special: Mapping[int, str],
    image_id: int | None,
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """What a sequence says, from its first token on, in order.

    Args:
        turns: those that were sampled in this sequence, by their numbers in the trajectory.
        numbers: an image's hash → its number.
        special: control token id → its text.
        image_id: an image's placeholder.

    Returns:
        {"role": "" if the template names none, "content": texts and numbers of images as they follow each other}; of a sampled
        answer also {"turn": its number}, and its content is what the template wrote before it.
    """
    ids = sequence.ids.tolist()
    places = _places(sequence, image_id, numbers)
    begins = {turn.start: (number, turn.end) for number, turn in turns.items()}
    stops = {*(i for i, token in enumerate(ids) if token in special or token == image_id), *begins, len(ids)}
    ahead = sorted(stops, reverse=True)
    said: list[dict[str, Any]] = [{"role": "", "content": []}]
    at, may_name = 0, True
    while at < len(ids) or at in begins:
        if at in begins:
            said[-1]["turn"], end = begins.pop(at)
            said.append({"role": "", "content": []})
        elif at in places:
            said[-1]["content"].append(places[at])
            end = at + 1
        elif at in stops:
            end = at + 1
            if image_id not in ids[max(0, at - 1) : end + 1]:  # not one of those around an image
                named = _NAMED.fullmatch(special[ids[at]])
                said += [{"role": named[1], "content": []}] if named else []
                may_name = not named
        else:
            while ahead[-1] <= at:
                ahead.pop()
            end = ahead[-1]
            text = decode(ids[at:end])
            if may_name and (named := _SPEAKER.match(text)):
                said.append({"role": named[1], "content": []})
                text = text[named.end() :]
            said[-1]["content"].append(text)
            may_name = False
        at = end
    for message in said:
        _strip(message["content"])
    return [message for message in said if message["content"] or "turn" in message]


def _places(sequence: TokenSequence, image_id: int | None, numbers: Mapping[str, int]) -> dict[int, int]:
    """Where each image begins → its number."""
    placeholders = np.flatnonzero(sequence.ids == image_id).tolist() if image_id is not None else []
    patches = np.cumsum([0, *(math.prod(grid) for _, grid in sequence.images)]).tolist()
    starts = [len(placeholders) * patch // patches[-1] for patch in patches[:-1]] if placeholders else []
    images = [numbers[image.hash] for image, _ in sequence.images]
    return {placeholders[start]: image for start, image in zip(starts, images, strict=False)}


def _strip(content: list[str | int]) -> None:
    """Drop the line breaks that a template puts around a message."""
    for end, strip in ((0, str.lstrip), (-1, str.rstrip)):
        while content and isinstance(text := content[end], str):
            content[end] = strip(text, "\n")
            if content[end]:
                break
            del content[end]
