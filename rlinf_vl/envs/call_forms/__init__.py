"""The forms in which policies write calls of tools: a reader and a writer for each.

`rollout.episode.words` finds the one of a checkpoint in its chat template.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_vl.envs.call_forms.base import CallForm, Tools, WrittenCall
from rlinf_vl.envs.call_forms.braced import BracedCalls
from rlinf_vl.envs.call_forms.listed import (
    ArgumentCalls,
    BareJsonCalls,
    BracketCalls,
    PythonCalls,
)
from rlinf_vl.envs.call_forms.tagged import JsonCalls, PairCalls, ParameterCalls

__all__ = [
    "FORMS",
    "JSON_CALLS",
    "CallForm",
    "ReplyForm",
    "Tools",
    "WrittenCall",
    "count_unread",
]

#: The form that environments describe for a model without a form of its own.
JSON_CALLS: CallForm = JsonCalls()
#: Forms with marks come before those that take a whole reply.
FORMS: tuple[CallForm, ...] = (
    JSON_CALLS,
    ParameterCalls(),
    PairCalls("\n"),
    PairCalls(""),
    BracketCalls(),
    ArgumentCalls(),
    BracedCalls(),
    PythonCalls("<|tool_call_start|>", "<|tool_call_end|>"),
    PythonCalls("<|python_start|>", "<|python_end|>"),
    BareJsonCalls(),
    PythonCalls(),
)
#: Texts that no reply holds but for a call: the mark that opens it, in any form.
_OPENING = re.compile(
    "|".join(sorted({re.escape(f.marks[0]) for f in FORMS if f.marks} | {"<function="}))
)


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a checkpoint writes its replies.

    Attributes:
        calls: the form of calls; None if no known one reads what the checkpoint's template writes.
        thought_end: the mark behind thoughts, which are no part of the reply.
        refusal: why calls can't be read; "" if they can.
    """

    calls: CallForm | None = JSON_CALLS
    thought_end: str = "</think>"
    refusal: str = ""

    def require_calls(self) -> CallForm:
        """Return the form of calls. Raises ValueError: it is not known."""
        if self.calls is None:
            raise ValueError(self.refusal)
        return self.calls


def count_unread(text: str, calls: Sequence[WrittenCall]) -> int:
    """Return the number of calls in a reply that could not be read.

    They are the broken ones, and the marks of calls, of any form, outside of those in `calls`.
    """
    spans = [(call.start, call.end) for call in calls]
    strays = 0
    for mark in _OPENING.finditer(text):
        is_read = any(start <= mark.start() < end for start, end in spans)
        # A tag within a stray call is no second one.
        strays += not is_read and not (mark[0] == "<function=" and _follows_tag(text, mark.start()))
    return strays + sum(call.named is None for call in calls)


def _follows_tag(text: str, position: int) -> bool:
    return text[:position].rstrip().endswith("<tool_call>")
