"""The key by which two short texts are compared: case, typography and punctuation aside, the signs of numbers kept.

Invariant: texts that mean different numbers or formulas have different keys: 5 and −5, 15 and 1.5, 34 and 3/4, 2(x + 1) and
2x + 1. Where a sign may or may not carry meaning it is kept, so a doubtful pair is refused.
"""

import re
import unicodedata

_DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−﹘﹣－"), "-")
_SPELLINGS = str.maketrans(
    {chr(ascii_code + 0xFEE0): chr(ascii_code) for ascii_code in range(0x21, 0x7F)}  # full-width signs
    | {"’": "'", "‘": "'", "`": "'", "´": "'", "′": "'", "“": '"', "”": '"', "„": '"', "″": '"', "·": "⋅", "。": "."}
)
_ENCLOSURES = (("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("$", "$"), ("'", "'"), ('"', '"'), ("«", "»"))
#: Signs that make a text a formula or a quantity: nothing but spaces and final stops is dropped from one.
_FORMULA = re.compile(r"[0-9+=<>/\\^*|~#&@_%°√∠∞±⋅×÷$€£¥]|(?<![^\W\d_])-")
_THOUSANDS = re.compile(r"(?<![\w.,([{])([0-9]{1,3}(?:,[0-9]{3})+)(?![\w,)\]}])")
_PREFIXES = re.compile(r"(?<=[0-9])\s*[mM](?=[A-Za-zΩ]{1,2}(?![A-Za-z]))")  # mW is not MW
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "lg", "exp", "det", "min", "max"}

#: Marks above and below letters, signs of formulas, currencies, and other symbols: all that changes what a word means.
_KEPT_CATEGORIES = {"Mn", "Mc", "Sm", "Sc", "So", "No"}


def text_key(text: str) -> str:
    """Return the key of a text; "" of one without a letter, digit or sign."""
    text = unicodedata.normalize("NFC", text).translate(_SPELLINGS).translate(_DASHES)
    text = _without_enclosures(" ".join(text.split()))
    text = re.sub(r"(?<=[^\s.])\.{1,3}$", "", text.rstrip(" ,;:?…"))
    if not _is_formula(text):
        return "".join(c for c in text.casefold() if c.isalnum() or unicodedata.category(c) in _KEPT_CATEGORIES)
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), _without_enclosures(text))
    text = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", text)
    text = re.sub(r"(?<=[^\W\d_]{2})[.,]?\s+", " ", text)  # "Paris, 1999", "No. 5"
    kept_case = {match.end() - 1 for match in _PREFIXES.finditer(text)}
    text = "".join(c if place in kept_case else c.lower() for place, c in enumerate(text))
    return re.sub(r"(?<=[0-9]) (?=[0-9.])", "_", text).replace(" ", "")


def _is_formula(text: str) -> bool:
    """Return whether signs count: there are digits or signs of formulas, a prime, or a hyphen that may be a minus."""
    if _FORMULA.search(text) or any(c.isdigit() or unicodedata.category(c) in ("Sm", "No") for c in text):
        return True
    if re.search(r"(?<![^\W\d_])[^\W\d_]['!\"](?![^\W\d_])|\b[^\W\d_]\(", text):  # A', n!, f(x)
        return True
    for before, after in re.findall(r"([^\W\d_]+)-\s*([^\W\d_]*)", text.casefold()):
        if len(before) + len(after) < 4 or {before, after} & _FUNCTIONS:  # x-y is no compound, T-shirt is one
            return True
    return False


def _without_enclosures(text: str) -> str:
    """Return a text without the quotes, emphasis or brackets that enclose the whole of it."""
    for _ in range(4):
        inner = text
        for opening, closing in _ENCLOSURES:
            between = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and between.strip() and opening not in between:
                inner = between.strip()
                break
        else:
            between = text[1:-1]
            if (
                text[:1] + text[-1:] in ("()", "[]", "{}")
                and not re.search(r"[()\[\]{},;]", between)
                and between.strip()
            ):
                inner = between.strip()
        if inner == text:
            break
        text = inner
    return text
