"""Finds the forms in which a checkpoint's chat template writes calls, thoughts and results.

The template is tried out: it renders calls with arguments of every type, two calls, calls beside a
text and a thought, and results. A form of calls is the checkpoint's if its reader reads every one
of these renderings back exactly, after the tokenizer has encoded and decoded them. A template that
shows no calls has no form of its own; then JSON in <tool_call> is what environments describe.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from rlinf_vl.data.unusable import shorten
from rlinf_vl.envs.call_forms import FORMS, JSON_CALLS, CallForm, ReplyForm
from rlinf_vl.types import Message

#: The marks around thoughts that are known, the usual ones first.
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought", "<channel|>"),
)
#: Length in characters up to which a rendering is shown in an error.
MAX_SHOWN = 600
_QUESTION: Message = {"role": "user", "content": "QUESTION"}
_CONTENT, _THOUGHT, _RESULT = "CONTENT", "THOUGHT", "RESULT"
#: The JSON Schemas of the parameters of tools that try out a template, by name.
PROBE_SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "place": {"type": "object"},
    "points": {"type": "array"},
}


def probe_tools(*names: str) -> list[dict[str, Any]]:
    """Return descriptions of tools of these names, whose parameters are `PROBE_SCHEMAS`."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A tool to try out the chat template.",
                "parameters": {"type": "object", "properties": PROBE_SCHEMAS, "required": []},
            },
        }
        for name in names
    ]


_TOOLS = probe_tools("probe_one", "probe_two")
#: The replies to try out: calls, each (name, arguments).
_REPLIES: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (
    (("probe_one", {"text": "a word"}),),
    (("probe_one", {"text": 'two "lines",\n<b>é</b>: {x}'}),),
    # Texts that look like values of other types.
    (("probe_one", {"text": "12"}), ("probe_two", {"text": "true"})),
    (("probe_two", {"count": 3, "share": 0.5}),),
    (("probe_one", {"flag": True}), ("probe_one", {"flag": False})),
    (("probe_one", {"place": {"x": 1, "name": "a b"}, "points": [1, [2, "c"]]}),),
    (("probe_two", {}),),
)

#: Renders (messages, tools, whether with a generation prompt).
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]


@dataclass(frozen=True, slots=True)
class Words:
    """The forms of a checkpoint's calls, thoughts and results.

    Attributes:
        calls: the form of calls; None if no known one reads what the template renders.
        shows_calls: whether the template shows the calls of messages; if not, `calls` is JSON.
        arguments_as_text: whether the template takes arguments as JSON text, not as a mapping.
        shows_content_beside_calls: whether a message with calls may have a text, too.
        thought_marks: the marks around thoughts.
        shows_thoughts: whether the template shows `reasoning_content` of the last answer.
        keeps_thoughts: whether it shows those of answers before the last question, too.
        shows_results: whether it shows messages of role tool.
        shows_pictures_in_results: whether it shows the pictures of these.
        sample: what the template renders of a call, for errors.
    """

    calls: CallForm | None
    shows_calls: bool
    arguments_as_text: bool
    shows_content_beside_calls: bool
    thought_marks: tuple[str, str]
    shows_thoughts: bool
    keeps_thoughts: bool
    shows_results: bool
    shows_pictures_in_results: bool
    sample: str

    @property
    def reply_form(self) -> ReplyForm:
        """How the checkpoint writes replies, for those who read them."""
        readable = "; ".join(form.name for form in FORMS)
        refusal = (
            "the checkpoint's chat template writes calls of tools in a form that is not known: "
            f"{shorten(repr(self.sample), MAX_SHOWN)}; known are {readable}. Set `chat_template` "
            "of the checkpoint's tokenizer to one that writes such a form, or describe the tools "
            "and a form of their calls in a message"
        )
        return ReplyForm(self.calls, self.thought_marks[1], "" if self.calls else refusal)


def find_words(render: Render, through_ids: Callable[[str], str] = str) -> Words:
    """Find the forms of a checkpoint's words.

    Args:
        render: the chat template; it may raise anything.
        through_ids: encodes a text to ids, and decodes them as a reply's are.
    """
    prober = _Prober(render)
    plain = prober.answer({"content": _CONTENT})
    as_text = False
    sample = prober.calls_text(_REPLIES[0], as_text)
    if sample is None or "probe_one" not in sample or "{'" in sample:
        # Some templates write arguments as they are, which must be a text then.
        as_text = True
        text_sample = prober.calls_text(_REPLIES[0], as_text)
        if text_sample is None or "probe_one" not in text_sample:
            as_text = False
        else:
            sample = text_sample
    shows_calls = sample is not None and "probe_one" in sample
    calls: CallForm | None = JSON_CALLS
    mixed = prober.calls_text(_REPLIES[0], as_text, _CONTENT)
    if shows_calls:
        calls = _form_of(prober, as_text, through_ids)
    marks, shows_thoughts, keeps_thoughts = _thoughts(prober)
    result = prober.result([{"type": "text", "text": _RESULT}], as_text)
    picture = {"type": "image_url", "image_url": {"url": "image://probe"}}
    with_picture = prober.result([{"type": "text", "text": _RESULT}, picture], as_text)
    return Words(
        calls=calls,
        shows_calls=shows_calls,
        arguments_as_text=as_text,
        shows_content_beside_calls=mixed is not None and _CONTENT in mixed,
        thought_marks=marks,
        shows_thoughts=shows_thoughts,
        keeps_thoughts=keeps_thoughts,
        shows_results=_RESULT in (prober.result(_RESULT, as_text) or ""),
        shows_pictures_in_results=with_picture is not None and with_picture != result,
        sample=sample if sample is not None else plain or "",
    )


def _form_of(
    prober: "_Prober", as_text: bool, through_ids: Callable[[str], str]
) -> CallForm | None:
    """Return the form whose reader reads all replies back; None if there is none.

    Of several, the one whose writer writes what the template does comes first.
    """
    renderings: list[tuple[str, Any]] = []
    for reply in _REPLIES:
        for message in ({}, {"reasoning_content": _THOUGHT}, {"content": _CONTENT}):
            text = prober.calls_text(reply, as_text, **message)
            # A template may refuse two calls, or a text or a thought beside calls.
            if text is not None:
                renderings.append((text, reply))
    fitting = [form for form in FORMS if all(_reads(form, *r, through_ids) for r in renderings)]
    text, reply = renderings[0]
    written = [form for form in fitting if form.write(reply) in text]
    return next(iter([*written, *fitting]), None)


def _reads(form: CallForm, text: str, reply: Any, through_ids: Callable[[str], str]) -> bool:
    """Return whether a form's reader reads exactly these calls, from the text and from its ids."""
    if not form.marks and _CONTENT in text:
        return True  # without a mark a call must be the whole reply
    expected = _comparable(reply)
    texts = {text, through_ids(text)}
    for variant in texts:
        # A thought stands before the reply, and readers get the reply alone.
        for _, end in THOUGHT_MARKS:
            variant = variant.rpartition(end)[2]
        calls = form.read(variant.strip(), _TOOLS)
        named = [call.named for call in calls]
        if None in named or _comparable(named) != expected:
            return False
    return True


def _comparable(calls: Sequence[Any]) -> str:
    """Return calls as a text that differs for 1, 1.0, True and "1"."""
    return json.dumps([list(call) for call in calls], sort_keys=True)


def _thoughts(prober: "_Prober") -> tuple[tuple[str, str], bool, bool]:
    """Return the marks around thoughts, and whether the template shows the last one and others."""
    answer = {"role": "assistant", "content": _CONTENT, "reasoning_content": _THOUGHT}
    text = prober.rendered([_QUESTION, answer], ()) or ""
    head, is_shown, tail = text.partition(_THOUGHT)
    for begin, end in THOUGHT_MARKS:
        if is_shown and head.rstrip().endswith(begin) and tail.lstrip().startswith(end):
            history = prober.rendered([_QUESTION, answer, _QUESTION], ())
            return (begin, end), True, history is not None and _THOUGHT in history
    return THOUGHT_MARKS[0], False, False


class _Prober:
    """Renders small conversations; None stands for one that the template refuses."""

    def __init__(self, render: Render) -> None:
        self._render = render
        marked = self.rendered([_QUESTION, {"role": "assistant", "content": _CONTENT}], _TOOLS)
        #: What the template writes before an answer, and after it.
        self._head, _, self._tail = (marked or "").partition(_CONTENT)

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        try:
            return self._render(messages, tools, False)
        except Exception:  # templates raise whatever they like for messages that they refuse
            return None

    def answer(self, fields: Mapping[str, Any]) -> str | None:
        """Return the text of an answer with these fields, without what stands around it."""
        text = self.rendered([_QUESTION, {"role": "assistant", **fields}], _TOOLS)
        if text is None:
            return None
        # The head of an answer with a thought differs from that of one without.
        return text[len(commonprefix([self._head, text])) :].removesuffix(self._tail)

    def calls_text(self, reply: Any, as_text: bool, content: str = "", **fields: Any) -> str | None:
        """Return the text of an answer with calls."""
        return self.answer(
            {"content": content, "tool_calls": _messages_calls(reply, as_text)} | fields
        )

    def result(self, content: Any, as_text: bool) -> str | None:
        """Return what the template renders of a question, a call and its result."""
        calls = _messages_calls(_REPLIES[0], as_text)
        question: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        response: Message = {
            "role": "tool",
            "tool_call_id": calls[0]["id"],
            "name": "probe_one",
            "content": content,
        }
        return self.rendered([_QUESTION, question, response], _TOOLS)


def _messages_calls(reply: Any, as_text: bool) -> list[dict[str, Any]]:
    """Return calls as a message has them; the ids are such as Mistral's templates take."""
    return [
        {
            "type": "function",
            "id": f"call0000{number}",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if as_text else arguments,
            },
        }
        for number, (name, arguments) in enumerate(reply)
    ]
