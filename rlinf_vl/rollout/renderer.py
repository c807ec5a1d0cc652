"""Messages → token ids, by the checkpoint's chat template; and what follows a sampled answer, without encoding it again.

Invariants:
- Control tokens and image placeholders come from the template alone. What looks like one in a message's text is encoded as the
  text that it is.
- Ids are only appended to: sampled ids are never decoded and encoded again, as other ids may have the same text.
"""

import copy
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from rlinf_vl.models.processing import Processor
from rlinf_vl.types import ImageRef, Message

#: Answers that a template must show as they were sampled, with {} for a mark.
_ANSWERS = ("{}", "<think>\nso\n</think>\n\n{}")
#: What an answer may stand behind.
_HISTORIES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ],
)


class TemplateError(ValueError):
    """The chat template can't continue a conversation after an answer that stands as it was sampled."""


class Renderer:
    """The chat template of a `Processor`'s tokenizer. Safe to use from any thread."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer

    def prompt(self, messages: Sequence[Message], images: Sequence[ImageRef]) -> tuple[np.ndarray, np.ndarray]:
        """Render messages and a generation prompt; expand each image's placeholder to as many ids as the image has tokens.

        Returns:
            (ids int32 [P], grids int32 [len(images), 3]).

        Raises:
            ValueError: the rendered prompt does not hold one placeholder per image.
        """
        marked, mark, _ = self._mark(messages)
        return self._expand(self._encode(self._render(marked), mark), images)

    def extend(
        self, ids: np.ndarray, messages: Sequence[Message], images: Sequence[ImageRef]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What follows `ids`, which end with a sampled answer: the end of the turn where the answer was cut before it, what
        the template puts between turns, the messages with these images, and the next generation prompt.

        Returns:
            (new ids int32 [N], grids int32 [len(images), 3]).

        Raises:
            ValueError: as `prompt`. TemplateError: what follows depends on what was said before, or the template shows
                answers other than they were sampled.
        """
        marked, mark, answer = self._mark(messages)
        following = {self._after(answer, history, shown, marked) for history in _HISTORIES for shown in _ANSWERS}
        if len(following) > 1:
            raise TemplateError(
                "the chat template renders messages in a way that depends on what was said before them, so that a "
                "conversation can't be continued token by token"
            )
        new = self._encode(following.pop(), mark)
        stop_ids = self._processor.stop_ids
        if not new or new[0] not in stop_ids:
            raise TemplateError(
                f"the chat template puts {self._tokenizer.decode(new[:1])!r} behind an answer, which does not end one: the "
                f"checkpoint's stop ids are those of {self._tokenizer.convert_ids_to_tokens(list(stop_ids))}"
            )
        return self._expand(new[1:] if ids[-1] == new[0] else new, images)

    def _after(self, mark: str, history: list[Message], shown: str, messages: list[Message]) -> str:
        """What the template writes behind an answer."""
        asked = self._render(history)
        answered = self._render([*history, {"role": "assistant", "content": shown.format(mark)}, *messages])
        before, _, after = answered.partition(mark)
        if before + mark != asked + shown.format(mark) or mark in after:
            raise TemplateError(
                "the chat template shows an earlier answer other than it was sampled (it drops or adds thoughts, or trims), so "
                f"that a conversation can't be continued token by token: {shown.format('…')!r} after {asked[-40:]!r} became "
                f"{(before + '…')[-80:]!r}"
            )
        return after

    def _render(self, messages: Sequence[Message]) -> str:
        rendered = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        return rendered

    def _expand(self, ids: list[int], images: Sequence[ImageRef]) -> tuple[np.ndarray, np.ndarray]:
        rendered = np.asarray(ids, np.int32)
        grids = np.asarray([self._processor.grid(image) for image in images], np.int32).reshape(len(images), 3)
        is_image = rendered == self._processor.image_token_id
        if int(is_image.sum()) != len(images):
            raise ValueError(
                f"the rendered prompt holds {int(is_image.sum())} {self._processor.family.image_token} for {len(images)} "
                "images: the messages do not show each image once, or the chat template does not render them"
            )
        repeats = np.ones(len(rendered), np.int64)
        repeats[is_image] = self._processor.image_tokens(grids)
        return np.repeat(rendered, repeats), grids

    def _encode(self, rendered: str, mark: str) -> list[int]:
        """Ids of what the template wrote. With a mark, what stands between special tokens is encoded by itself, as it always is,
        and as text without any."""
        if not mark:
            return self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"({'|'.join(map(re.escape, self._special))})", rendered)):
            if i % 2:
                ids.append(self._tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                text = piece.replace(mark, "")
                ids += self._text_only(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _mark(self, messages: Sequence[Message]) -> tuple[list[Message], str, str]:
        """If texts of the messages spell a special token, perhaps only when a template joins them: the messages with a mark that
        keeps it apart from the template's own, behind the first character of anything that begins like one.

        Returns:
            (messages, mark or "", another mark that no text has).
        """
        texts: list[str] = []
        _map_texts(list(messages), texts.append)
        joined = "".join(texts)
        mark, spare = islice(
            (c for c in map(chr, range(0xE000, 0xF900)) if c not in joined), 2
        )  # they stand for nothing
        if not any(token in joined for token in self._special):
            return list(messages), "", spare
        begins = {f"{re.escape(token[:1])}(?={re.escape(token[1:2])}|$)" for token in self._special}
        return _map_texts(list(messages), lambda text: re.sub("|".join(begins), rf"\g<0>{mark}", text)), mark, spare

    @cached_property
    def _special(self) -> list[str]:
        """All special tokens, longer ones first."""
        known = self._tokenizer.added_tokens_decoder.values()
        tokens = {token.content for token in known if token.special} | set(self._tokenizer.all_special_tokens)
        return sorted(tokens, key=len, reverse=True)

    @cached_property
    def _text_only(self) -> Any:
        """A tokenizer of its own for texts with special tokens: the setting is the object's, and threads share the other."""
        return copy.deepcopy(self._tokenizer)


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """The same with every text changed, addresses of images aside."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key: item if key in ("type", "image", "image_url") else _map_texts(item, change)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return value
