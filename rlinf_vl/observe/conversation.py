"""A trajectory as a conversation: the messages, their roles, and the images in them.

It is read off the token ids: only a special token ends a message or names its role, whatever a text
spells.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlinf_vl.data.clips import is_clip
from rlinf_vl.types import TokenSequence, Turn

ROLES = "system|developer|user|assistant|model|tool|observation|environment"
#: A role at the beginning of a text, alone on its line: it follows a token that only opens a
#: message.
_LEADING_ROLE = re.compile(rf"({ROLES})(?:\n|$)")
#: A role within a control token, such as <|user|>.
_TOKEN_ROLE = re.compile(rf"\W*({ROLES})\W*")


#: The time that some templates write before each temporal patch of a clip.
_TIME = re.compile(r"<\d+\.\d seconds>$")


class Placeholders(NamedTuple):
    """The token ids that stand for images and for clips; None: there is no such token."""

    image: int | None
    video: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids that there are."""
        return tuple(token_id for token_id in self if token_id is not None)


def messages(
    sequence: TokenSequence,
    turns: Mapping[int, Turn],
    numbers: Mapping[str, int],
    special: Mapping[int, str],
    placeholders: Placeholders,
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Return the messages of a sequence, from its first token on, in order.

    Args:
        turns: the turns sampled in this sequence, by their numbers in the trajectory.
        numbers: an image's hash → its number.
        special: control token id → its text.
        placeholders: those of images and of clips.

    Returns:
        {"role": "" if the template names none, "content": texts and numbers of images as they
        follow each other}; a sampled answer also has {"turn": its number}, and its content is the
        template's text before it.
    """
    ids = sequence.ids.tolist()
    image_spans = _image_spans(sequence, placeholders, numbers)
    turn_starts = {turn.start: (number, turn.end) for number, turn in turns.items()}
    stops = {
        *(i for i, token in enumerate(ids) if token in special or token in placeholders),
        *turn_starts,
        len(ids),
    }
    # Text is decoded in one piece from stop to stop: tokens may be parts of one character.
    next_stops = sorted(stops, reverse=True)
    result: list[dict[str, Any]] = [{"role": "", "content": []}]
    position, may_name_role = 0, True
    while position < len(ids) or position in turn_starts:
        if position in turn_starts:
            result[-1]["turn"], end = turn_starts.pop(position)
            result.append({"role": "", "content": []})
        elif position in image_spans:
            content = result[-1]["content"]
            number, end = image_spans[position]
            if content and isinstance(content[-1], str) and ids[position] == placeholders.video:
                content[-1] = _TIME.sub("", content[-1])
                content[:] = filter(lambda part: part != "", content)
            content.append(number)
        elif position in stops:
            end = position + 1
            # control tokens beside an image's placeholder belong to the image
            if not set(placeholders.ids) & set(ids[max(0, position - 1) : end + 1]):
                role_match = _TOKEN_ROLE.fullmatch(special[ids[position]])
                result += [{"role": role_match[1], "content": []}] if role_match else []
                may_name_role = not role_match
        else:
            while next_stops[-1] <= position:
                next_stops.pop()
            end = next_stops[-1]
            text = decode(ids[position:end])
            if may_name_role and (role_match := _LEADING_ROLE.match(text)):
                result.append({"role": role_match[1], "content": []})
                text = text[role_match.end() :]
            result[-1]["content"].append(text)
            may_name_role = False
        position = end
    for message in result:
        _strip(message["content"])
    return [message for message in result if message["content"] or "turn" in message]


def _image_spans(
    sequence: TokenSequence, placeholders: Placeholders, numbers: Mapping[str, int]
) -> dict[int, tuple[int, int]]:
    """Return the position of each image's first placeholder → (the image's number, where it ends).

    A picture ends behind its first placeholder, and a clip behind its last one, since times may
    stand between its placeholders.
    """
    spans = {}
    for placeholder, is_video in ((placeholders.image, False), (placeholders.video, True)):
        of_kind = [pair for pair in sequence.images if is_clip(pair[0]) == is_video]
        positions = np.flatnonzero(sequence.ids == placeholder).tolist()
        if placeholder is None or not of_kind or not positions:
            continue
        # An image has one placeholder for a fixed number of patches, so patches divide the
        # placeholders.
        patches = np.cumsum([0, *(math.prod(grid) for _, grid in of_kind)]).tolist()
        edges = [len(positions) * patch // patches[-1] for patch in patches]
        for (image, _), first, last in zip(of_kind, edges, edges[1:], strict=False):
            end = positions[last - 1 if is_video else first] + 1
            spans[positions[first]] = numbers[image.hash], end
    return spans


def _strip(content: list[str | int]) -> None:
    """Drop the line breaks that a template puts around a message."""
    for end, strip in ((0, str.lstrip), (-1, str.rstrip)):
        while content and isinstance(text := content[end], str):
            content[end] = strip(text, "\n")
            if content[end]:
                break
            del content[end]
