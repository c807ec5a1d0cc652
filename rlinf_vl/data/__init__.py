"""Rows of datasets become `Problem`s; images stay the encoded bytes they came as until a model needs pixels."""


def shorten(text: str, length: int = 80) -> str:
    """The text, cut to `length` characters with an ellipsis if it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"
