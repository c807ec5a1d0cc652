"""Encodes the texts that a chat template renders.

Special tokens come from the template alone: where a message's text spells one, it is encoded as
ordinary text.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from rlinf_vl.models.byte_cache import ByteCache, text_bytes
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.placeholders import with_video_texts
from rlinf_vl.types import ImageRef, Message

#: Capacity of the cache of texts between turns with their ids, in bytes.
ENCODED_BYTES = 2**25
#: The keys of a message's part whose values are no text of the conversation.
_UNCHANGED_KEYS = ("type", "image", "image_url", "video", "video_url")


class TextEncoder:
    """The tokenizer of a `Processor`, for rendered texts. Safe to use from any thread."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer

    def encode(
        self, rendered: str, mark: str, clips: Iterator[ImageRef] | None = None
    ) -> list[int]:
        """Encode a rendered text, with the times of the clips that it shows.

        `clips` are those of the conversation that no earlier text has shown.

        With a mark, the special tokens are those of the template alone. The text between them is
        encoded without the marks, and as text even where it then spells a special token.
        """
        rendered = self._processor.image_tokens.with_placeholders(rendered)
        if clips is not None and self._processor.video_token:
            rendered = with_video_texts(self._processor, rendered, clips)
        if not mark:
            return list(self.encode_plain(rendered))
        ids: list[int] = []
        for i, piece in enumerate(
            re.split(f"({'|'.join(map(re.escape, self._special))})", rendered)
        ):
            if i % 2:
                ids.append(self._tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                text = piece.replace(mark, "")
                ids += self._text_only(text, add_special_tokens=False, split_special_tokens=True)[
                    "input_ids"
                ]
        return ids

    def mark_special(
        self, messages: Sequence[Message], n: int, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[tuple[list[Message], list[dict[str, Any]]], str, list[str]]:
        """Mark texts of the messages that spell a special token, so that the token is not one.

        The mark goes after the first character of everything that may begin one, because a token
        may come about only when the template joins two texts.

        Returns:
            (copies of the messages and tools, the mark or "" if none was needed, `n` further
            marks). The marks are characters that occur in no text.
        """
        texts: list[str] = []

        def note(text: str) -> str:
            texts.append(text)
            return text

        _map_conversation(messages, tools, note)
        joined = "".join(texts)
        # Characters of the private use area, which have no meaning.
        unused = (c for c in map(chr, range(0xE000, 0xF900)) if c not in joined)
        mark, *further_marks = islice(unused, n + 1)
        if not any(token in joined for token in self._special):
            return ([{**message} for message in messages], list(tools)), "", further_marks
        starts = {f"{re.escape(token[:1])}(?={re.escape(token[1:2])}|$)" for token in self._special}
        pattern = re.compile("|".join(starts))
        marked = _map_conversation(messages, tools, lambda text: pattern.sub(rf"\g<0>{mark}", text))
        return marked, mark, further_marks

    @cached_property
    def encode_plain(self) -> ByteCache[str, tuple[int, ...]]:
        """The cache of the ids of texts without marks.

        A game's text between turns is the same again and again.
        """

        def encode(text: str) -> tuple[int, ...]:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

        return ByteCache(encode, size=text_bytes, max_bytes=ENCODED_BYTES)

    @cached_property
    def _special(self) -> list[str]:
        """All special tokens, longer ones first, as one may begin with another."""
        added_tokens = self._tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added_tokens if token.special}
        return sorted(special | set(self._tokenizer.all_special_tokens), key=len, reverse=True)

    @cached_property
    def _text_only(self) -> Any:
        """A copy of the tokenizer for texts that spell special tokens.

        `split_special_tokens` changes the tokenizer object itself, which threads share.
        """
        return copy.deepcopy(self._tokenizer)


def _map_conversation(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], change: Callable[[str], str]
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return copies of messages and tools with every text changed, except the images' addresses."""
    changed_messages = []
    for message in messages:
        changed = {key: _map_texts(value, change) for key, value in message.items()}
        content = message["content"]
        if isinstance(content, list):
            changed["content"] = [_map_part(part, change) for part in content]
        changed_messages.append(changed)
    return changed_messages, _map_texts(list(tools), change)


def _map_part(part: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a message's part with every text changed, except an image's address."""
    if not isinstance(part, dict):
        return _map_texts(part, change)
    return {
        key: value if key in _UNCHANGED_KEYS else _map_texts(value, change)
        for key, value in part.items()
    }


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a JSON-like value with every text changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        # Templates show the keys of arguments and of tools' parameters.
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return value
