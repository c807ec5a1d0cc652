"""The options of a question, read from a row's column or the question, and found by letter or text."""

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlinf_vl.rewards.text_key import text_key
from rlinf_vl.rewards.texts import MAX_TEXT_LENGTH

_ARTICLE = re.compile(r"(?:a|an|the)\s+", re.IGNORECASE)
#: An option in a question: "A. …" or "(A) …", up to the next one.
_LISTED = re.compile(
    r"(?:^|(?<=\s))[(\[]?([A-Z])[)\].:]\s+(.*?)(?=\s+[(\[]?[A-Z][)\].:]\s|\s*$)", re.DOTALL
)
#: An option's text in a column that begins with its letter: "A. circle".
_OPTION_LED = re.compile(r"(?:[(\[]\s*([A-Z])\s*[)\]]|([A-Z])\s*[).:])\s*\S.*", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """The options of a question.

    Attributes:
        texts: the options' texts by letter; empty where they are unknown.
        letters: the letters that are options.
    """

    texts: Mapping[str, str]
    letters: frozenset[str]

    def letter(self, letter: str) -> str | None:
        """Return a letter in upper case if it is an option's."""
        return letter.upper() if letter.upper() in self.letters else None

    def of_text(self, text: str) -> str | None:
        """Return the letter of the only option with this text, articles aside."""
        text = bare_text(text)
        # Saves computing a long text's key.
        if not self.texts or len(text) > self._max_option_length:
            return None
        for wording, letters in zip(
            (text, _without_article(text)), self._letters_by_key, strict=True
        ):
            letter = letters.get(text_key(wording))
            if letter is not None:
                return letter or None
        return None

    @cached_property
    def _max_option_length(self) -> int:
        """The largest length of a text that may equal an option's, however it is spelled."""
        return 3 * max(map(len, self.texts.values())) + 20

    @cached_property
    def _letters_by_key(self) -> tuple[dict[str, str], dict[str, str]]:
        """Letters by the options' keys: of the whole texts, and of the texts without an article.

        A letter is "" where two options have the same key.
        """
        letters_by_text: dict[str, str] = {}
        letters_by_noun: dict[str, str] = {}
        for letter, option in self.texts.items():
            noun_key = text_key(_without_article(option))
            for letters, key in ((letters_by_text, text_key(option)), (letters_by_noun, noun_key)):
                if key:
                    letters[key] = "" if key in letters else letter
        return letters_by_text, letters_by_noun


def bare_text(text: str) -> str:
    """Return a text without the marks, quotes or dollar signs that enclose it."""
    text = text.strip()
    while len(text) > 2 and (
        text[0] == text[-1] and text[0] in "*`\"'$_" or text[0] + text[-1] in ("“”", "‘’")
    ):
        text = text[1:-1].strip()
    return text


def _without_article(text: str) -> str:
    """Return a text without an article at its start."""
    return _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text


def options_of(column: Any) -> dict[str, str]:
    """Return the options' texts by letter from a column's value; {} if it holds no options."""
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except ValueError:
            return listed_options(column)
    if isinstance(column, Mapping):
        return {
            str(key).strip().upper(): str(value)
            for key, value in column.items()
            if value is not None
        }
    if not isinstance(column, Sequence):
        return {}
    texts = [str(option) for option in column]
    matches = [_OPTION_LED.fullmatch(text.strip()) for text in texts]
    # Texts that carry their letters, in order: take the letters off.
    if all(matches) and [m[1] or m[2] for m in matches if m] == list(
        string.ascii_uppercase[: len(texts)]
    ):
        texts = [re.sub(r"^[(\[]?\s*[A-Z]\s*[)\].:]+\s*", "", text.strip()) for text in texts]
    return dict(zip(string.ascii_uppercase, texts, strict=False))


def listed_options(prompt: str) -> dict[str, str]:
    """Return the options that a question lists, from A on."""
    options: dict[str, str] = {}
    for letter, text in _LISTED.findall(prompt[-4 * MAX_TEXT_LENGTH :]):
        if letter == "A":  # a new list: the last one counts
            options = {}
        if letter == string.ascii_uppercase[len(options) % 26]:
            options[letter] = text.strip().splitlines()[0] if text.strip() else ""
    return options if len(options) > 1 else {}
