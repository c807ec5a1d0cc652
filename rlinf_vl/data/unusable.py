"""Errors of unusable images and rows, each with the kind under which bad rows are counted."""

from dataclasses import dataclass

#: Kinds that several modules use.
PROMPT_UNUSABLE = "prompt unusable"
PROMPT_TOO_LONG = "prompt too long"
TRAJECTORY_TOO_LONG = "trajectory too long"
ANSWER_UNUSABLE = "answer unusable"
NOT_FETCHED = "image not fetched"
ENVIRONMENT_UNUSABLE = "environment unusable"
NO_TEACHER = "teacher unknown"
QUARANTINED = "quarantined"


class ImageError(ValueError):
    """A value that should be an image or a video can't be used as one."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class RowError(ValueError):
    """A row that can't become a problem."""

    def __init__(self, row_id: str, kind: str, reason: str) -> None:
        super().__init__(row_id, kind, reason)
        self.row_id = row_id
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"row {self.row_id}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """The record of a row that can't be used."""

    kind: str
    id: str
    reason: str


def kind_and_reason(error: Exception) -> tuple[str, str]:
    """Return the kind under which a bad row is counted, and the reason why it is bad.

    The kind of an error that is neither a RowError nor an ImageError is its type.
    """
    if isinstance(error, (RowError, ImageError)):
        return error.kind, error.reason
    return type(error).__name__, str(error)


def shorten(text: str, length: int = 80) -> str:
    """Cut a text to at most `length` characters, with an ellipsis if it was longer."""
    return text if len(text) <= length else text[: length - 1] + "…"
