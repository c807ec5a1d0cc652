"""The reward of a smoke run. Nothing is imported here, as processes that score import it."""

import zlib


def spread(response: str, answer: str) -> float:
    """Return a number between 0 and 1 made of the text: random weights know no right answers, and
    groups whose rewards tie would train nothing."""
    return zlib.crc32(response.encode()) % 1000 / 1000
