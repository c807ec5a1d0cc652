"""Variables of chat templates that a config may set (`rollout.chat_template_kwargs`)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Variables that the run sets itself, and arguments of `apply_chat_template`.
RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "enable_thinking",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


def unnamed_variables(variables: Mapping[str, Any], template: str) -> Iterator[str]:
    """Yield a problem for each variable whose name does not occur in a template's text.

    Jinja ignores such a variable, so that the prompt would silently be another.
    """
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            yield (
                f"rollout.chat_template_kwargs: the checkpoint's chat template has no variable "
                f"{name!r}; leave it out, or name a checkpoint whose template has it"
            )
