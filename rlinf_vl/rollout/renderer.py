"""Messages → token ids, by the checkpoint's chat template; and what follows a sampled answer, without encoding it again.

Invariants:
- Control tokens and image placeholders come from the template alone. What looks like one in a message's text is encoded as the
  text that it is.
- Sampled ids are never decoded and encoded again, as other ids may have the same text, unless the template rewrites them: what
  stands is appended to, or a new sequence begins with ids of its own.
"""

import copy
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from rlinf_vl.errors import ConfigError
from rlinf_vl.models.byte_cache import ByteCache, text_bytes
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.observation import Observation
from rlinf_vl.types import ImageRef, Message

#: What thoughts stand between in an answer's text.
THINK, END_THINK = "<think>", "</think>"
#: Bytes of rendered prompts that are kept, and of texts between turns with their ids.
RENDERED_BYTES, ENCODED_BYTES = 2**26, 2**25
_QUESTION: list[Message] = [{"role": "user", "content": "a"}]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What of an answer is thought.

    Attributes:
        tokens: how many of its tokens, from the first on, are thoughts with their marks.
        open: how many stand before a thought that is not closed; None: none is open.
        said: text of what it says behind its thoughts; "" while one is open.
    """

    tokens: int
    open: int | None
    said: str


class Renderer:
    """The chat template of a `Processor`'s tokenizer. Safe to use from any thread."""

    def __init__(self, processor: Processor, thinking: str = "auto") -> None:
        """`thinking`: whether the template is told to have the model think (on), not to (off), or nothing (auto).

        Raises:
            ConfigError: the template doesn't know what it is told.
        """
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._options = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}
        if self._options:
            told = {mode: self._render(_QUESTION, enable_thinking=mode == "on") for mode in ("on", "off")}
            if told["on"] == told["off"] and not (thinking == "on" and self._begins_with_thoughts):
                always = ", and has every answer begin with thoughts" if self._begins_with_thoughts else ""
                raise ConfigError(
                    f"rollout.thinking.mode: {thinking}, but the checkpoint's chat template doesn't know enable_thinking{always}; "
                    "set rollout.thinking.mode=auto, or name a checkpoint whose template knows it"
                )

    def prompt(self, messages: Sequence[Message], images: Sequence[ImageRef]) -> tuple[np.ndarray, np.ndarray]:
        """Render messages and a generation prompt; expand each image's placeholder to as many ids as the image has tokens.

        Returns:
            (ids int32 [P], grids int32 [len(images), 3]).

        Raises:
            ValueError: the rendered prompt does not hold one placeholder per image.
        """
        marked, mark, _ = self._mark(messages, 0)
        return self._expand(self._encode(self._render(marked), mark), images)

    def follow(
        self, ids: np.ndarray, start: Observation, turns: Sequence[tuple[np.ndarray, Observation]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The prompt of the next turn: the whole conversation as the template shows it, and a generation prompt.

        It begins with `ids` where the template shows everything up to the last answer as it stands; behind that come the end of
        the turn, unless the answer ended with it, what the template puts between turns, and what was said. A template that
        rewrites history (it drops thoughts of earlier answers, say) begins otherwise: then all is encoded anew, but for what
        answers say behind their thoughts, which has the ids that were sampled.

        Args:
            ids: what stands, int32 [T]: the last turn's prompt, and the answer sampled behind it.
            start: what the conversation began with.
            turns: the ids of each answer, as sampled, and what was said to it.

        Returns:
            (ids int32 [P], grids int32 [n, 3] of all images).

        Raises:
            ValueError: as `prompt`.
        """
        shown = [self._shown(sampled) for sampled, _ in turns]
        messages, places = list(start.messages), []
        for (thoughts, _), (_, said) in zip(shown, turns, strict=True):
            places.append(len(messages))
            messages += [{"role": "assistant", "content": thoughts}, *said.messages]
        marked, mark, marks = self._mark(messages, len(turns))
        for place, stands in zip(places, marks, strict=True):  # for what the answer says behind its thoughts
            marked[place]["content"] += stands
        before = self._render(marked[: places[-1]]) + marked[places[-1]]["content"]
        rendered = self._render(marked)
        if rendered.startswith(before):
            new, stop_ids = self._encode(rendered[len(before) :], mark), self._processor.stop_ids
            ended = bool(len(turns[-1][0])) and ids[-1] in stop_ids
            if not ended or new[:1] and new[0] in stop_ids:
                following, grids = self._expand(new[1:] if ended and ids[-1] == new[0] else new, turns[-1][1].images)
                earlier = [image for said in (start, *(said for _, said in turns[:-1])) for image in said.images]
                thought = shown[-1][0] and not shown[-1][1] and self.thoughts(turns[-1][0]).open is not None
                closing = (
                    [self.closing] if thought and not ended else []
                )  # the template was told where its thoughts end
                return np.concatenate([ids, *closing, following]), np.concatenate([self._grids(earlier), grids])
        anew: list[int] = []
        for piece in re.split(f"([{''.join(marks)}])", rendered):
            anew += shown[marks.index(piece)][1] if piece in marks else self._encode(piece, mark)
        return self._expand(anew, [image for said in (start, *(said for _, said in turns)) for image in said.images])

    def thoughts(self, answer: np.ndarray) -> Thoughts:
        """What of an answer, int32 [R], is thought: all up to the last `</think>`, and everything while a thought is open. A thought
        begins with `<think>`, or with the answer where the generation prompt ends with that."""
        text = None if self._marks.keys() >= {THINK, END_THINK} else self._text(answer)
        begin, end = self._last(THINK, answer, text), self._last(END_THINK, answer, text)
        if begin is not None and (end is None or begin[0] >= end[1]):
            return Thoughts(len(answer), begin[0], "")
        if end is None:
            opened = self._begins_with_thoughts
            return Thoughts(len(answer), 0, "") if opened else Thoughts(0, None, self._processor.decode(answer))
        split = self._text(answer[slice(*end)]).rpartition(END_THINK)[2]  # of a token that also ends the thoughts
        return Thoughts(end[1], None, (split + self._processor.decode(answer[end[1] :])).lstrip())

    @property
    def think_id(self) -> int | None:
        """Id of `<think>`, if that is one token."""
        return self._marks.get(THINK)

    @cached_property
    def closing(self) -> np.ndarray:
        """What closes a thought, int32 [n]."""
        return np.array(self._tokenizer(f"\n{END_THINK}\n\n", add_special_tokens=False)["input_ids"], np.int32)

    def _last(self, mark: str, ids: np.ndarray, text: str | None) -> tuple[int, int] | None:
        """The last place of a mark: its first token, and the one behind it. One that has a token is nothing else; any other is
        looked for in the `text` of the ids."""
        if mark in self._marks:
            own = np.flatnonzero(ids == self._marks[mark])
            return (int(own[-1]), int(own[-1]) + 1) if len(own) else None
        if text is None or mark not in text:
            return None
        first = bisect_left(range(len(ids)), True, key=lambda i: mark not in self._text(ids[i + 1 :]))
        ends = range(first + 1, len(ids) + 1)
        return first, ends[bisect_left(ends, True, key=lambda end: mark in self._text(ids[first:end]))]

    @cached_property
    def _marks(self) -> dict[str, int]:
        """Ids of those marks that are one token."""
        known = self._tokenizer.get_vocab()
        return {mark: known[mark] for mark in (THINK, END_THINK) if mark in known}

    def _text(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _shown(self, sampled: np.ndarray) -> tuple[str, list[int]]:
        """An answer's thoughts with what ends them, as text, and the ids of what it says behind them; its end left out."""
        ids = sampled[: len(sampled) - (sampled[-1:] == np.array(self._processor.stop_ids)[:, None]).any()]
        text = self._processor.decode(ids)
        thoughts, end, rest = text.rpartition(END_THINK)
        if not end:
            cut = self._begins_with_thoughts or text.lstrip().startswith(THINK)
            return (f"{text}\n{END_THINK}\n\n", []) if cut else ("", ids.tolist())
        said = rest.lstrip()
        first = bisect_left(range(len(ids)), True, key=lambda i: len(self._processor.decode(ids[i:])) <= len(said))
        split = said[: len(said) - len(self._processor.decode(ids[first:]))]  # of a token that also ends the thoughts
        return thoughts + end + rest[: len(rest) - len(said)], [*self._encode(split, ""), *ids[first:].tolist()]

    @cached_property
    def _begins_with_thoughts(self) -> bool:
        """Whether the generation prompt ends with the begin of thoughts."""
        return self._render(_QUESTION).rstrip().endswith(THINK)

    def _render(self, messages: Sequence[Message], **options: bool) -> str:
        """What was rendered last is kept: the next prompt of an episode begins with this one."""
        try:
            written = json.dumps(messages)
        except (TypeError, ValueError):  # the template may know more than JSON
            return self._rendered(messages, **options)
        return self._rendered_json((written, *options.items()))

    @cached_property
    def _rendered_json(self) -> ByteCache[tuple[Any, ...], str]:
        def rendered(argument: tuple[Any, ...]) -> str:
            written, *options = argument
            return self._rendered(json.loads(written), **dict(options))

        return ByteCache(rendered, size=text_bytes, max_bytes=RENDERED_BYTES)

    def _rendered(self, messages: Sequence[Message], **options: bool) -> str:
        options = self._options | options
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **options
        )
        assert isinstance(rendered, str)
        return rendered

    def _expand(self, ids: list[int], images: Sequence[ImageRef]) -> tuple[np.ndarray, np.ndarray]:
        rendered, grids = np.asarray(ids, np.int32), self._grids(images)
        is_image = rendered == self._processor.image_token_id
        if int(is_image.sum()) != len(images):
            raise ValueError(
                f"the rendered prompt holds {int(is_image.sum())} {self._processor.family.image_token} for {len(images)} "
                "images: the messages do not show each image once, or the chat template does not render them"
            )
        repeats = np.ones(len(rendered), np.int64)
        repeats[is_image] = self._processor.image_tokens(grids)
        return np.repeat(rendered, repeats), grids

    def _grids(self, images: Sequence[ImageRef]) -> np.ndarray:
        return np.asarray([self._processor.grid(image) for image in images], np.int32).reshape(len(images), 3)

    def _encode(self, rendered: str, mark: str) -> list[int]:
        """Ids of what the template wrote. With a mark, what stands between special tokens is encoded by itself, as it always is,
        and as text without any."""
        if not mark:
            return list(self._encode_plain(rendered))
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"({'|'.join(map(re.escape, self._special))})", rendered)):
            if i % 2:
                ids.append(self._tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                text = piece.replace(mark, "")
                ids += self._text_only(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _mark(self, messages: Sequence[Message], n: int) -> tuple[list[Message], str, list[str]]:
        """If texts of the messages spell a special token, perhaps only when a template joins them: the messages with a mark that
        keeps it apart from the template's own, behind the first character of anything that begins like one.

        Returns:
            (the messages, whose contents may be replaced, mark or "", `n` other marks that no text has).
        """
        texts: list[str] = []
        _map_texts(list(messages), texts.append)
        joined = "".join(texts)
        mark, *spare = islice(
            (c for c in map(chr, range(0xE000, 0xF900)) if c not in joined), n + 1
        )  # they mean nothing
        if not any(token in joined for token in self._special):
            return [{**message} for message in messages], "", spare
        begins = {f"{re.escape(token[:1])}(?={re.escape(token[1:2])}|$)" for token in self._special}
        return _map_texts(list(messages), lambda text: re.sub("|".join(begins), rf"\g<0>{mark}", text)), mark, spare

    @cached_property
    def _encode_plain(self) -> ByteCache[str, tuple[int, ...]]:
        """Ids of what has no mark. What a game puts between turns is the same again and again, so the last texts' are kept."""

        def encoded(text: str) -> tuple[int, ...]:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

        return ByteCache(encoded, size=text_bytes, max_bytes=ENCODED_BYTES)

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
