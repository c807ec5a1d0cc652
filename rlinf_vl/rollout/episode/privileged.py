"""The prompt of a teacher that sees more than the policy does.

The text is `algorithm.distillation.privileged_template`, with the values of a row.
"""

import re
from collections.abc import Sequence

from rlinf_vl.data.unusable import RowError
from rlinf_vl.types import Message, Problem

#: A name in braces, which stands for a value of the row.
_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
COLUMN_MISSING = "column missing"


def privileged_text(problem: Problem, template: str) -> str:
    """Return the template with the row's values in place of {answer} and columns in braces.

    Values are put in as they are: braces in them are text.

    Raises:
        RowError: the row has no such column, or it is empty.
    """
    values = problem.columns | {"answer": problem.answer}

    def value_of(match: re.Match[str]) -> str:
        value = values.get(match[1])
        if value is None or value == "":
            columns = ", ".join(values)
            raise RowError(
                problem.id,
                COLUMN_MISSING,
                f"algorithm.distillation.privileged_template: {match[0]} has no value in this "
                f"row, which has {columns}",
            )
        return str(value)

    return _NAME.sub(value_of, template)


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with a text at the end of the last one, on a line of its own."""
    *earlier, last = messages
    text, content = f"\n{text}", last["content"]
    if isinstance(content, str):
        return [*earlier, last | {"content": content + text}]
    parts = list(content)
    if parts and parts[-1].get("type") == "text":
        parts[-1] = parts[-1] | {"text": parts[-1]["text"] + text}
    else:
        parts.append({"type": "text", "text": text})
    return [*earlier, last | {"content": parts}]
