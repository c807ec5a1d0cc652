"""What is too long, cut from the left to what fits: texts by characters, images whole, earlier messages whole.

The messages are cut, not the ids: the chat template writes what is left, so its marks of turns and its generation prompt stand, an
image has all of its placeholders or none, and pixels, grids and hashes are those of the images that are left.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any

from rlinf_vl.rollout.observation import Observation
from rlinf_vl.types import Message


def cut(said: Observation, fits: Callable[[Observation], bool], roles: Collection[str]) -> Observation | None:
    """The longest end of a conversation that fits, system messages aside, which stay whole and where they are.

    A cut is within a message of one of these roles, and everything before it goes: so an answer in the history goes with the
    question before it. Of the last such message something is left.

    Returns:
        None: no end fits.
    """
    parts = [(m, p, part) for m, message in enumerate(said.messages) for p, part in enumerate(_parts(message))]
    parts = [(m, p, part) for m, p, part in parts if said.messages[m]["role"] in roles]
    # A place before each character, and each image.
    ends = list(accumulate(len(_text(part)) or 1 for _, _, part in parts))

    def cut_at(place: int) -> Observation:
        k = bisect_right(ends, place)
        return _from(said, parts[k][0], parts[k][1], place - (ends[k - 1] if k else 0))

    places = range(1, ends[-1] if ends else 1)
    place = bisect_left(places, True, key=lambda place: fits(cut_at(place)))
    return cut_at(places[place]) if place < len(places) else None


def _from(said: Observation, m: int, p: int, characters: int) -> Observation:
    """Message `m` from its part `p` on, without so many characters of that, and the messages behind it."""
    first, rest = said.messages[m], list(_parts(said.messages[m])[p:])
    if text := _text(rest[0]):
        rest[0] = rest[0] | {"text": text[characters:]}
    content = rest[0]["text"] if isinstance(first["content"], str) else rest
    system = [message for message in said.messages[:m] if message["role"] == "system"]
    messages = (*system, first | {"content": content}, *said.messages[m + 1 :])
    shown = (part["image_url"]["url"] for message in messages for part in _parts(message) if "image_url" in part)
    images = {image.url: image for image in said.images}
    return Observation(messages, tuple(images[url] for url in shown))


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text(part: dict[str, Any]) -> str:
    return part.get("text", "") if part.get("type") == "text" else ""
