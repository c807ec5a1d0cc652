"""Cuts a conversation from the left until it fits: texts by characters, images and messages whole.

The messages are cut, not the ids. The chat template then renders what remains, so its marks of
turns and its generation prompt are complete, an image has all of its placeholders or none, and
pixels, grids and hashes are those of the images that remain.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any

from rlinf_vl.rollout.observation import Observation
from rlinf_vl.types import ImageRef, Message


def cut(
    conversation: Observation, fits: Callable[[Observation], bool], roles: Collection[str]
) -> Observation | None:
    """Return the longest end of a conversation that fits, or None if no end fits.

    System messages stay whole and in place. The cut lies within a message of one of `roles`, and
    everything before it is removed; so an answer in the history goes with the question before it.
    Something of the last message of these roles always remains.
    """
    parts: list[tuple[int, int, dict[str, Any]]] = []  # (message index, part index, part)
    for m, message in enumerate(conversation.messages):
        if message["role"] in roles:
            parts += [(m, p, part) for p, part in enumerate(_parts(message))]
    # Positions for a cut are counted through all parts: one per character, and one per image.
    ends = list(accumulate(len(_text(part)) or 1 for _, _, part in parts))

    def cut_at(position: int) -> Observation:
        k = bisect_right(ends, position)
        m, p, _ = parts[k]
        return _from(conversation, m, p, position - (ends[k - 1] if k else 0))

    # A later cut leaves less, so `fits` is False up to some position and True from there on.
    positions = range(1, ends[-1] if ends else 1)
    first_fitting = bisect_left(positions, True, key=lambda position: fits(cut_at(position)))
    return cut_at(positions[first_fitting]) if first_fitting < len(positions) else None


def _from(conversation: Observation, m: int, p: int, n_characters: int) -> Observation:
    """Return the end of a conversation, with the system messages before it.

    The end begins in part `p` of message `m`, after that part's first `n_characters`.
    """
    first_message = conversation.messages[m]
    parts = _parts(first_message)[p:]
    if text := _text(parts[0]):
        parts[0] = parts[0] | {"text": text[n_characters:]}
    content = parts[0]["text"] if isinstance(first_message["content"], str) else parts
    messages = [message for message in conversation.messages[:m] if message["role"] == "system"]
    messages.append(first_message | {"content": content})
    messages += conversation.messages[m + 1 :]
    images = {image.url: image for image in conversation.images}
    remaining: list[ImageRef] = []
    for message in messages:
        urls = [part["image_url"]["url"] for part in _parts(message) if "image_url" in part]
        remaining += [images[url] for url in urls]
    return Observation(tuple(messages), tuple(remaining))


def _parts(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a message's content, in a new list."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text(part: dict[str, Any]) -> str:
    """Return the text of a part, "" for an image."""
    return part.get("text", "") if part.get("type") == "text" else ""
