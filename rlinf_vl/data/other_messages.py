"""Messages of other systems in OpenAI's form: LLaVA's and ShareGPT's, LLaMA-Factory's, ms-swift's.

{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cup."}
{"from": "function_call", "value": "{\"name\": …}"}, {"from": "observation", "value": "…"}
{"role": "tool_call", "content": "{\"name\": …}"}, {"role": "tool_response", "content": "…"}
"""

from collections.abc import Sequence
from typing import Any

from rlinf_vl.data.tool_fields import parsed
from rlinf_vl.data.unusable import shorten

#: Role of another system → OpenAI's; "call" for calls of tools in a message of their own.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}


def openai_messages(messages: Sequence[Any]) -> list[Any]:
    """Return messages in OpenAI's form; whatever is no message stays as it is.

    Calls of tools in messages of their own become those of the answer before them, or an answer
    without a text.

    Raises:
        ValueError: a message with `from` has no `value`, or has a role beside it.
    """
    plain: list[Any] = []
    for message in messages:
        if not isinstance(message, dict):
            plain.append(message)
            continue
        if isinstance(message.get("from"), str) and message.get("role") is None:
            if not isinstance(message.get("value"), str | list):
                raise ValueError(f"{shorten(repr(message))} has 'from' and no 'value'")
            fields = {k: v for k, v in message.items() if k not in ("from", "value", "role")}
            # Tables fill in the keys of other rows.
            fields.pop("content", None)
            message = {"role": message["from"], "content": message["value"], **fields}
        role = message.get("role")
        role = _ROLES.get(role, role) if isinstance(role, str) else role
        if role != "call":
            plain.append(message | {"role": role} if role != message.get("role") else message)
            continue
        previous = plain[-1] if plain and isinstance(plain[-1], dict) else {}
        if previous.get("role") != "assistant":
            previous = {"role": "assistant", "content": "", "tool_calls": []}
            plain.append(previous)
        calls = [*(previous.get("tool_calls") or []), *_calls(message["content"])]
        weights = {"weight": message["weight"]} if message.get("weight") is not None else {}
        plain[-1] = previous | {"tool_calls": calls} | weights
    return plain


def _calls(content: Any) -> list[Any]:
    """Return the calls of a message of calls: one as JSON, or a list of them."""
    value = parsed(content, "content") if isinstance(content, str) else content
    return value if isinstance(value, list) else [value]
