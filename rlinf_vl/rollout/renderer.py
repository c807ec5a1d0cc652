"""Messages → token ids, by the checkpoint's chat template; and what follows a sampled answer, without encoding it again.

Invariants:
- Control tokens and image placeholders come from the template alone. What looks like one in a message's text is encoded as the
  text that it is.
- Ids are only appended to: sampled ids are never decoded and encoded again, as other ids may have the same text.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rlinf_vl.models.processing import Processor
from rlinf_vl.types import ImageRef, Message

#: Keys of a message's parts that hold no text for the model.
_NO_TEXT = ("type", "image", "image_url")
#: Characters that stand for nothing: marks in a text, until it is encoded.
_MARKS = [chr(code) for code in range(0xE000, 0xF900)]
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
        marked, mark = self._mark(messages)
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
        marked, mark = self._mark(messages)
        answer = next(c for c in _MARKS if c != mark and not any(c in text for m in messages for text in _texts(m)))
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
        """Ids of what the template wrote, the special tokens in messages' own texts as text.

        Where a text has one, a mark behind its first character keeps it apart from those of the template, whatever the
        template does with the text; what stands between the template's tokens is encoded by itself, as it always is.
        """
        if not mark:
            return self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"({self._special})", rendered)):
            if i % 2:
                ids.append(self._tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                text = piece.replace(mark, "")
                ids += self._text_only(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _mark(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """The messages with a mark in each special token of a text, and the mark: empty if there is no such token."""
        texts = [text for message in messages for text in _texts(message)]
        joined = "".join(texts)  # a template may put two parts side by side
        places = [match.start() for match in re.finditer(f"(?={self._special})", joined)]
        if not places:
            return list(messages), ""
        mark = next(c for c in _MARKS if c not in joined)
        bounds = np.cumsum([0, *map(len, texts)])
        marked = []
        for text, start, end in zip(texts, bounds, bounds[1:], strict=False):
            for place in reversed([p - start for p in places if start <= p < end]):
                text = text[: place + 1] + mark + text[place + 1 :]
            marked.append(text)
        rest = iter(marked)
        return [_with_texts(message, rest) for message in messages], mark

    @cached_property
    def _special(self) -> str:
        """A regular expression for any special token."""
        known = self._tokenizer.added_tokens_decoder.values()
        tokens = {token.content for token in known if token.special} | set(self._tokenizer.all_special_tokens)
        return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))

    @cached_property
    def _text_only(self) -> Any:
        """A tokenizer of its own for texts with special tokens: the setting is the object's, and threads share the other."""
        return copy.deepcopy(self._tokenizer)


def _texts(value: Any) -> Iterator[str]:
    """Every text of a message, its images' addresses aside, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _NO_TEXT:
                yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _with_texts(value: Any, texts: Iterator[str]) -> Any:
    """The message with other texts in the order of `_texts`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {key: item if key in _NO_TEXT else _with_texts(item, texts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_texts(item, texts) for item in value]
    return value
