"""Renders messages to token ids with the checkpoint's chat template, turn by turn.

Invariants:
- Control tokens and image placeholders come from the template alone. Text of a message that looks
  like one is encoded as ordinary text.
- Sampled ids are never decoded and encoded again, because other ids may have the same text. The
  next prompt appends to them; only if the template rewrites the history does a new sequence begin.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rlinf_vl.config.chat_template import unnamed_variables
from rlinf_vl.data.clips import is_clip
from rlinf_vl.envs.call_forms import FORMS
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.byte_cache import ByteCache, text_bytes
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.placeholders import expand_images, with_video_parts
from rlinf_vl.rollout.episode.text_encoder import TextEncoder
from rlinf_vl.rollout.episode.words import THOUGHT_MARKS, Words, find_words
from rlinf_vl.types import ImageRef, Message

#: The usual marks that enclose thoughts in an answer's text.
THINK, END_THINK = THOUGHT_MARKS[0]
#: Capacity of the cache of rendered prompts, in bytes.
RENDERED_BYTES = 2**26
#: The bytes for which the characters of byte-level vocabularies stand.
_BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
#: A minimal conversation, to try out the template.
_QUESTION: list[Message] = [{"role": "user", "content": "a"}]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The thoughts of an answer.

    Attributes:
        tokens: the number of the answer's leading tokens that are thoughts, marks included.
        open: the number of tokens before a thought that is not closed; None if none is open.
        reply: the text after the thoughts; "" while one is open.
    """

    tokens: int
    open: int | None
    reply: str


class Renderer:
    """The chat template of a `Processor`'s tokenizer. Safe to use from any thread."""

    def __init__(
        self,
        processor: Processor,
        thinking: str = "auto",
        template_variables: Mapping[str, Any] | None = None,
        keeps_thoughts: bool = False,
    ) -> None:
        """
        Args:
            thinking: the template's option enable_thinking, "on" or "off"; "auto" leaves it out.
            template_variables: further ones, as `rollout.chat_template_kwargs`.
            keeps_thoughts: whether prompts keep the thoughts of earlier answers, as sampled, where
                the template drops them (`rollout.thinking.history: keep`).

        Raises:
            ConfigError: the template ignores one of them.
        """
        self.processor = processor
        # Where marks of calls and thoughts are special tokens, no text without them can be read.
        processor.show_special([mark for form in FORMS for mark in form.marks])
        processor.show_special([mark for marks in THOUGHT_MARKS for mark in marks])
        self._tokenizer = processor.tokenizer
        self._encoder = TextEncoder(processor)
        template = self._tokenizer.chat_template
        self._options = dict(template_variables or {})
        self._keeps_thoughts = keeps_thoughts
        # A checkpoint may have several templates by name.
        template_text = template if isinstance(template, str) else json.dumps(template)
        if problems := list(unnamed_variables(self._options, template_text)):
            raise ConfigError(*problems)
        if thinking != "auto":
            self._options["enable_thinking"] = thinking == "on"
            with_thinking = self._render(_QUESTION, enable_thinking=True)
            is_ignored = with_thinking == self._render(_QUESTION, enable_thinking=False)
            # A template that always opens a thought needs no option for "on".
            if is_ignored and not (thinking == "on" and self.begins_with_thoughts):
                always = (
                    ", and has every answer begin with thoughts"
                    if self.begins_with_thoughts
                    else ""
                )
                raise ConfigError(
                    f"rollout.thinking.mode: {thinking}, but the checkpoint's chat template "
                    f"doesn't know enable_thinking{always}; set rollout.thinking.mode=auto, or "
                    "name a checkpoint whose template knows it"
                )

    def prompt(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageRef],
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode messages and a generation prompt.

        The placeholder of each image is repeated once per token of the image.

        Args:
            tools: OpenAI's descriptions of functions, which the template shows.

        Returns:
            (ids int32 [P], grids int32 [len(images), 3]).

        Raises:
            ValueError: the rendered prompt does not hold one placeholder per image, or the template
                shows no tools.
        """
        self._check_tools(tools)
        marked, mark, _ = self._encoder.mark_special(messages, 0, tools)
        clips = filter(is_clip, images)
        return self._expand(self._encoder.encode(self._render(*marked), mark, clips), images)

    def check_shown(self, messages: Sequence[Message]) -> None:
        """Check that the chat template shows what messages say beside their content.

        Raises:
            ValueError: it leaves out calls, thoughts or results, which is named.
        """
        for number, message in enumerate(messages, 1):
            is_result = message["role"] == "tool"
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            pictures = any(part.get("type") != "text" for part in parts)
            checks = (
                ("tool_calls", bool(message.get("tool_calls")), "shows_calls"),
                ("reasoning_content", bool(message.get("reasoning_content")), "shows_thoughts"),
                ("the role 'tool'", is_result, "shows_results"),
                (
                    "a picture in a tool's result",
                    is_result and pictures,
                    "shows_pictures_in_results",
                ),
            )
            for name, is_there, fact in checks:
                if is_there and not getattr(self.words, fact):
                    raise ValueError(
                        f"message {number} has {name}, which the checkpoint's chat template does "
                        "not show; write it into the content, or name a checkpoint whose template "
                        "shows it"
                    )

    def conversation(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageRef],
        imitated: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
        """Encode a conversation that ends with an answer, as if the answers to imitate had been
        sampled: each behind the prompt that the policy would have got there, encoded on its own,
        with the token that ends its turn.

        Args:
            messages: the assistant's have a text as content; thoughts in it are taken as
                `reasoning_content` where the template shows that.
            imitated: the indices of the messages to imitate, in order, the last one among them.
            tools: OpenAI's descriptions of functions, which the template shows.

        Returns:
            (ids int32 [T], (start, end) of each of these answers, grids int32 [len(images), 3]).

        Raises:
            ValueError: as `prompt` and `check_shown`; or the template changes an answer (it drops
                the thoughts of earlier ones, say), renders what comes before it in another way when the
                conversation goes on, or writes no stop token after it.
        """
        self._check_tools(tools)
        self.check_shown(messages)
        if self.words.shows_thoughts:
            messages = [_with_thoughts_apart(m, self.words.thought_marks) for m in messages]
        (marked, marked_tools), text_mark, end_marks = self._encoder.mark_special(
            messages, len(imitated), tools
        )
        rendered = self._render(marked, marked_tools, add_generation_prompt=False)
        prompts = [self._render(marked[:i], marked_tools) for i in imitated]
        answers = [dict(marked[i]) for i in imitated]
        # An answer with calls ends behind these, which take no mark.
        heads = {
            i: self._render(marked[: i + 1], marked_tools, add_generation_prompt=False)
            for i in imitated
            if marked[i].get("tool_calls")
        }
        for i, end_mark in zip(imitated, end_marks, strict=True):
            if i not in heads:
                marked[i]["content"] += end_mark
        marked_text = self._render(marked, marked_tools, add_generation_prompt=False)
        stop_texts = [self.token_text(stop_id) for stop_id in self.processor.stop_ids]
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        position = n_marks = 0  # in `rendered`, up to where `ids` reach; marks up to there
        clips = filter(is_clip, images)
        for k, (i, prompt, answer) in enumerate(zip(imitated, prompts, answers, strict=True)):
            own_row = "give the conversation up to there as a row of its own"
            is_kept = rendered.startswith(prompt) and rendered.startswith(heads.get(i, ""))
            if not is_kept or len(prompt) < position:
                raise ValueError(
                    f"the checkpoint's chat template renders what comes before message {i + 1} in "
                    f"another way once the conversation goes on; {own_row}"
                )
            if i in heads:
                end = _turn_end(rendered, len(prompt), len(heads[i]), stop_texts)
            else:
                # Without the marks of the answers before this one.
                end = marked_text.find(end_marks[k]) - n_marks
                n_marks += 1
            if not self._says(rendered[len(prompt) : max(end, 0)], answer, text_mark, tools):
                raise ValueError(
                    f"the checkpoint's chat template changes message {i + 1} (it trims white "
                    "space, or drops the thoughts of an earlier answer); write it as the template "
                    f"leaves it, or {own_row}, with weight 0 for the answers before"
                )
            stop = next((text for text in stop_texts if rendered.startswith(text, end)), None)
            if stop is None:
                raise ValueError(
                    f"the checkpoint's chat template writes {rendered[end : end + 20]!r} after "
                    f"message {i + 1}, and none of its stop tokens, {', '.join(stop_texts)}: the "
                    "policy would learn never to end"
                )
            ids += self._encoder.encode(rendered[position : len(prompt)], text_mark, clips)
            start, position = len(ids), end + len(stop)
            ids += self._encoder.encode(rendered[len(prompt) : position], text_mark)
            spans.append((start, len(ids)))
        expanded, lengths = expand_images(self.processor, ids, images)
        # An image's placeholder stands for several tokens.
        positions = np.append(0, np.cumsum(lengths)).tolist()
        return (
            expanded,
            [(positions[start], positions[end]) for start, end in spans],
            self._grids(images),
        )

    def _says(
        self, text: str, answer: Message, text_mark: str, tools: Sequence[dict[str, Any]]
    ) -> bool:
        """Return whether a rendered answer says all that its message does, unchanged."""
        content, thoughts = answer["content"], answer.get("reasoning_content", "")
        calls = answer.get("tool_calls")
        if thoughts:
            head, end_mark, text = text.rpartition(self.words.thought_marks[1])
            if not end_mark or not head.rstrip().endswith(thoughts.strip()):
                return False
            content = content.lstrip()
        if not calls:
            return text.endswith(content)
        form = self.words.reply_form.require_calls()
        written = form.read(text.replace(text_mark, "") if text_mark else text, tools)
        named = [call.named for call in written]
        functions = [call["function"] for call in calls]
        expected = [(function["name"], function["arguments"]) for function in functions]
        plain_calls = json.dumps(expected, sort_keys=True)
        if text_mark:
            plain_calls = plain_calls.replace(json.dumps(text_mark)[1:-1], "")
        is_equal = json.dumps(named, sort_keys=True) == plain_calls
        return is_equal and content.strip() in text

    def follow(
        self, ids: np.ndarray, start: Observation, turns: Sequence[tuple[np.ndarray, Observation]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode the prompt of the next turn: the whole conversation, and a generation prompt.

        If the template leaves everything up to the last answer unchanged, the prompt begins with
        `ids`. Then follow the end of the turn (unless the answer ended with it), the template's
        text between turns, and the last observation. If the template rewrites the history (it
        drops the thoughts of earlier answers, for example), everything is encoded anew, except the
        replies after the thoughts, which keep their sampled ids; with `keeps_thoughts` the prompt
        begins with `ids` then, too.

        Args:
            ids: the last turn's prompt and answer, int32 [T].
            start: the conversation's first observation.
            turns: for each answer, its sampled ids int32 [R] and the observation after it.

        Returns:
            (ids int32 [P], grids int32 [n, 3] of all images).

        Raises:
            ValueError: as `prompt`.
        """
        # (text of the thoughts, ids of the reply) of each answer. The template gets the thoughts as
        # text, as it may drop them, and a mark in place of the reply, whose ids replace it later.
        answers = [self._split_thoughts(sampled) for sampled, _ in turns]
        observations = [start, *(observation for _, observation in turns)]
        last_answer, last_observation = turns[-1]
        messages, answer_indices = list(start.messages), []
        for (thoughts, _), observation in zip(answers, observations[1:], strict=True):
            answer_indices.append(len(messages))
            messages += [{"role": "assistant", "content": thoughts}, *observation.messages]
        (marked, tools), text_mark, reply_marks = self._encoder.mark_special(
            messages, len(turns), start.tools
        )
        for index, reply_mark in zip(answer_indices, reply_marks, strict=True):
            marked[index]["content"] += reply_mark
        last_index = answer_indices[-1]
        unchanged = self._render(marked[:last_index], tools) + marked[last_index]["content"]
        rendered = self._render(marked, tools)
        is_rewritten = not rendered.startswith(unchanged)
        if self._keeps_thoughts and is_rewritten and reply_marks[-1] in rendered:
            # What the template writes behind the last answer does not depend on thoughts.
            unchanged = rendered[: rendered.rindex(reply_marks[-1]) + 1]
        if rendered.startswith(unchanged):
            new_clips = filter(is_clip, last_observation.images)
            new_ids = self._encoder.encode(rendered[len(unchanged) :], text_mark, new_clips)
            stop_ids = self.processor.stop_ids
            has_ended = bool(len(last_answer)) and ids[-1] in stop_ids
            # If the answer ended with a stop id, the template must write one here, too (perhaps
            # another, which is appended). Otherwise the two can't be joined.
            if not has_ended or new_ids[:1] and new_ids[0] in stop_ids:
                if has_ended and ids[-1] == new_ids[0]:
                    new_ids = new_ids[1:]
                new_ids, new_grids = self._expand(new_ids, last_observation.images)
                thoughts, reply_ids = answers[-1]
                parts = [ids, new_ids]
                is_cut = thoughts and not reply_ids and self.thoughts(last_answer).open is not None
                if is_cut and not has_ended:
                    # The answer was cut within a thought; the template got the thought closed.
                    parts = [ids, self.closing, new_ids]
                grids = self._grids(_images(observations[:-1]))
                return np.concatenate(parts), np.concatenate([grids, new_grids])
        rewritten: list[int] = []
        images = _images(observations)
        clips = filter(is_clip, images)
        for piece in re.split(f"([{''.join(reply_marks)}])", rendered):
            if piece in reply_marks:
                rewritten += answers[reply_marks.index(piece)][1]
            else:
                rewritten += self._encoder.encode(piece, text_mark, clips)
        return self._expand(rewritten, images)

    def _check_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if there are tools, and the template shows none."""
        if tools and self._render(_QUESTION, tools) == self._render(_QUESTION):
            raise ValueError(
                "the checkpoint's chat template does not show tools; describe them in a message"
            )

    def part_ends(self, answer: np.ndarray, tools: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Return the numbers of an answer's tokens, int32 [R], before its content and before its
        calls of tools; the latter is R without calls.

        A token that lies in two parts belongs to the later one.
        """
        thoughts = self.thoughts(answer)
        form = self.words.calls
        calls = form.read(thoughts.reply, tools) if form is not None else []
        if not calls:
            return thoughts.tokens, len(answer)
        # Counted from the end, where thoughts and their marks make no difference.
        tail = len(thoughts.reply) - calls[0].start
        lengths = range(thoughts.tokens, len(answer))
        decode = self.processor.decode
        first = bisect_left(lengths, True, key=lambda i: len(decode(answer[i:])) <= tail)
        call_start = lengths[first] if first < len(lengths) else len(answer)
        if len(decode(answer[call_start:])) < tail:
            call_start -= 1
        return thoughts.tokens, call_start

    def thoughts(self, answer: np.ndarray) -> Thoughts:
        """Find the thoughts of an answer, int32 [R].

        They are everything up to the last `</think>`, or the whole answer while a thought is open.
        A thought begins with `<think>`, or with the answer if the generation prompt ends with
        that mark.
        """
        begin_mark, end_mark = self._thought_marks
        text = None if self._marks.keys() >= {begin_mark, end_mark} else self._text(answer)
        begin, end = self._last(begin_mark, answer, text), self._last(end_mark, answer, text)
        if begin is not None and (end is None or begin[0] >= end[1]):
            return Thoughts(len(answer), begin[0], "")
        if end is None:
            opened = self.begins_with_thoughts
            return (
                Thoughts(len(answer), 0, "")
                if opened
                else Thoughts(0, None, self.processor.decode(answer))
            )
        # The token that ends the mark may go on with the reply's first characters.
        mark_ids = answer[end[0] : end[1]]
        reply_start = self._text(mark_ids).rpartition(end_mark)[2]
        reply = (reply_start + self.processor.decode(answer[end[1] :])).lstrip()
        return Thoughts(end[1], None, reply)

    def thought_text(self, answer: np.ndarray) -> str:
        """Return the text of an answer's thoughts without their marks; "" if it has none."""
        text = self._text(answer[: self.thoughts(answer).tokens])
        for mark in self._thought_marks:
            text = text.replace(mark, "")
        return text.strip()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special ones included."""
        return self._text(np.array([token_id]))

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token, which may be parts of a character; None: not known."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        # The two forms of vocabularies: a byte as <0xE2>, or each byte as a character.
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(byte[1])
        if all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return None

    def encode(self, text: str) -> np.ndarray:
        """Encode a text that the policy is made to begin with, int32 [n]."""
        return np.array(self._encoder.encode_plain(text), np.int32)

    def count_tokens(self, content: str | Sequence[dict[str, Any]]) -> int:
        """Return the number of tokens of a message's texts."""
        parts = [{"text": content}] if isinstance(content, str) else content
        return sum(len(self._encoder.encode_plain(part.get("text", ""))) for part in parts)

    @property
    def think_id(self) -> int | None:
        """The id of the mark that opens a thought, None if it is several tokens."""
        return self._marks.get(self._thought_marks[0])

    @cached_property
    def closing(self) -> np.ndarray:
        """The ids that close a thought, int32 [n]."""
        return self.encode(f"\n{self._thought_marks[1]}\n\n")

    def _last(self, mark: str, ids: np.ndarray, text: str | None) -> tuple[int, int] | None:
        """Find the last occurrence of a mark; return its first token and the one after it.

        A mark with an id of its own is found by that. Any other is searched for in `text`, the
        text of the ids, and located by bisection over its tokens.
        """
        if mark in self._marks:
            indices = np.flatnonzero(ids == self._marks[mark])
            return (int(indices[-1]), int(indices[-1]) + 1) if len(indices) else None
        if text is None or mark not in text:
            return None
        first = bisect_left(
            range(len(ids)), True, key=lambda i: mark not in self._text(ids[i + 1 :])
        )
        ends = range(first + 1, len(ids) + 1)
        return first, ends[
            bisect_left(ends, True, key=lambda end: mark in self._text(ids[first:end]))
        ]

    @cached_property
    def _marks(self) -> dict[str, int]:
        """The ids of the marks that are one token."""
        vocabulary = self._tokenizer.get_vocab()
        return {mark: vocabulary[mark] for mark in self._thought_marks if mark in vocabulary}

    @property
    def _thought_marks(self) -> tuple[str, str]:
        """The marks that open and end the checkpoint's thoughts."""
        marks = self.words.thought_marks
        return (THINK, END_THINK) if marks == THOUGHT_MARKS[0] else marks

    def _text(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _split_thoughts(self, sampled: np.ndarray) -> tuple[str, list[int]]:
        """Split an answer: the text of its thoughts with the closing mark, and the reply's ids.

        A stop id at its end is left out. A thought that was cut is closed.
        """
        stop_ids = np.array(self.processor.stop_ids)
        has_stop_id = (sampled[-1:] == stop_ids[:, None]).any()
        ids = sampled[: len(sampled) - has_stop_id]
        text = self.processor.decode(ids)
        begin_mark, close_mark = self._thought_marks
        thoughts, end_mark, tail = text.rpartition(close_mark)
        if not end_mark:
            is_cut = self.begins_with_thoughts or text.lstrip().startswith(begin_mark)
            return (f"{text}\n{close_mark}\n\n", []) if is_cut else ("", ids.tolist())
        reply = tail.lstrip()
        # The first token whose text lies within the reply.
        first = bisect_left(
            range(len(ids)), True, key=lambda i: len(self.processor.decode(ids[i:])) <= len(reply)
        )
        # A token that ends the thoughts may hold the reply's first characters, which alone are
        # encoded again.
        split_text = reply[: len(reply) - len(self.processor.decode(ids[first:]))]
        thoughts_text = thoughts + end_mark + tail[: len(tail) - len(reply)]
        return thoughts_text, [*self._encoder.encode(split_text, ""), *ids[first:].tolist()]

    @cached_property
    def words(self) -> Words:
        """The forms of the checkpoint's calls, thoughts and results."""

        def render(messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
            return self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)

        def through_ids(text: str) -> str:
            return self.processor.decode(self.encode(text))

        return find_words(render, through_ids)

    @cached_property
    def begins_with_thoughts(self) -> bool:
        """Whether the generation prompt ends with the mark that opens a thought."""
        return self._render(_QUESTION).rstrip().endswith(self._thought_marks[0])

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), **options: Any
    ) -> str:
        """Render messages, from the cache if possible: an episode's next prompt needs it again."""
        try:
            conversation_json = json.dumps([messages, tools])
        except (TypeError, ValueError):  # the template may take values that JSON has not
            return self._apply_template(messages, tools, **options)
        return self._render_json((conversation_json, *options.items()))

    @cached_property
    def _render_json(self) -> ByteCache[tuple[Any, ...], str]:
        """The cache of rendered messages, by their JSON and the template's options."""

        def render(key: tuple[Any, ...]) -> str:
            conversation_json, *options = key
            return self._apply_template(*json.loads(conversation_json), **dict(options))

        return ByteCache(render, size=text_bytes, max_bytes=RENDERED_BYTES)

    def _apply_template(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), **options: Any
    ) -> str:
        if any(message.get("tool_calls") for message in messages) and self.words.arguments_as_text:
            messages = list(map(_with_text_arguments, messages))
        return self._rendered(messages, tools, **options)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], **options: Any
    ) -> str:
        options = {"add_generation_prompt": True} | self._options | options
        if not self._shows_image_urls:
            messages = [_with_image_parts(message) for message in messages]
        rendered = self._tokenizer.apply_chat_template(
            list(map(with_video_parts, messages)),
            tools=list(tools) or None,
            tokenize=False,
            **options,
        )
        assert isinstance(rendered, str)
        return rendered

    @cached_property
    def _shows_image_urls(self) -> bool:
        """Whether the template knows OpenAI's name of an image; those of LLaVA and InternVL do not."""
        texts = []
        for image in ([], [{"type": "image_url", "image_url": {"url": ""}}]):
            question = {"role": "user", "content": [*image, {"type": "text", "text": "a"}]}
            try:
                texts.append(self._tokenizer.apply_chat_template([question], tokenize=False))
            except TemplateError:
                return False
        return texts[0] != texts[1]

    def _expand(self, ids: list[int], images: Sequence[ImageRef]) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32 [P], grids int32 [len(images), 3]) with the images' ids."""
        return expand_images(self.processor, ids, images)[0], self._grids(images)

    def _grids(self, images: Sequence[ImageRef]) -> np.ndarray:
        return np.asarray([self.processor.grid(image) for image in images], np.int32).reshape(
            len(images), 3
        )


def _turn_end(rendered: str, start: int, end: int, stop_texts: Sequence[str]) -> int:
    """Return where the stop token of a turn, rendered[start:end], begins; `end` without one."""
    stops = [rendered.rfind(text, start, end) for text in stop_texts if text]
    return max((stop for stop in stops if stop >= 0), default=end)


def _with_thoughts_apart(message: Message, marks: tuple[str, str]) -> Message:
    """Return a message whose thoughts are not in its content but in `reasoning_content`."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    begin, end = marks
    head, end_mark, reply = content.partition(end)
    if not end_mark or message.get("reasoning_content"):
        return message
    thoughts = head.lstrip().removeprefix(begin).strip()
    if not thoughts:
        return message  # some templates would leave out the marks, too
    return {**message, "content": reply.lstrip("\n"), "reasoning_content": thoughts}


def _images(observations: Iterable[Observation]) -> list[ImageRef]:
    """Return the images of all observations, in order."""
    return [image for observation in observations for image in observation.images]


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        texts.append(call | {"function": function | {"arguments": arguments}})
    return {**message, "tool_calls": texts}


def _with_image_parts(message: Message) -> Message:
    """Return a message whose images have the name that transformers gives them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": "image"} if part.get("type") == "image_url" else part for part in content]
    return {**message, "content": parts}
