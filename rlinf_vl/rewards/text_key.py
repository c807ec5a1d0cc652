"""The key by which two short texts are compared, without case, typography and punctuation.

Invariant: texts that mean different numbers or formulas have different keys: 5 and −5, 15 and 1.5,
34 and 3/4, 2(x + 1) and 2x + 1. A sign that may carry meaning is kept, so a doubtful pair is
refused.
"""

import re
import unicodedata

_DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−﹘﹣－"), "-")
_SPELLINGS = str.maketrans(
    {
        chr(ascii_code + 0xFEE0): chr(ascii_code) for ascii_code in range(0x21, 0x7F)
    }  # full-width signs
    | {
        "’": "'",
        "‘": "'",
        "`": "'",
        "´": "'",
        "′": "'",
        "“": '"',
        "”": '"',
        "„": '"',
        "″": '"',
        "·": "⋅",
        "。": ".",
    }
)
#: Marks around a whole text; `**` stands before `*`, which would take only half of it.
_ENCLOSURES = [
    ("**", "**"),
    ("__", "__"),
    ("*", "*"),
    ("_", "_"),
    ("$", "$"),
    ("'", "'"),
    ('"', '"'),
    ("«", "»"),
]
#: Signs that make a text a formula or quantity, from which only spaces and final stops are dropped.
_FORMULA = re.compile(r"[0-9+=<>/\\^*|~#&@_%°√∠∞±⋅×÷$€£¥]|(?<![^\W\d_])-")
#: Digits grouped by commas, outside of lists and brackets: "1,440" is 1440, "(1,440)" is a pair.
_THOUSANDS = re.compile(r"(?<![\w.,([{])([0-9]{1,3}(?:,[0-9]{3})+)(?![\w,)\]}])")
#: A unit's prefix milli or mega, whose case counts: mW is not MW.
_PREFIXES = re.compile(r"(?<=[0-9])\s*[mM](?=[A-Za-zΩ]{1,2}(?![A-Za-z]))")
_FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "lg",
    "exp",
    "det",
    "min",
    "max",
}

#: Unicode categories that change what a word means: marks above and below letters, signs of
#: formulas, currencies and other symbols.
_KEPT_CATEGORIES = {"Mn", "Mc", "Sm", "Sc", "So", "No"}


def text_key(text: str) -> str:
    """Return the key of a text; "" if it has no letter, digit or sign."""
    text = unicodedata.normalize("NFC", text).translate(_SPELLINGS).translate(_DASHES)
    text = _without_enclosures(" ".join(text.split()))
    text = re.sub(r"(?<=[^\s.])\.{1,3}$", "", text.rstrip(" ,;:?…"))
    if not _is_formula(text):
        return "".join(
            c for c in text.casefold() if c.isalnum() or unicodedata.category(c) in _KEPT_CATEGORIES
        )
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), _without_enclosures(text))
    text = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", text)
    text = re.sub(r"(?<=[^\W\d_]{2})[.,]?\s+", " ", text)  # "Paris, 1999", "No. 5"
    prefix_indices = {match.end() - 1 for match in _PREFIXES.finditer(text)}
    text = "".join(c if index in prefix_indices else c.lower() for index, c in enumerate(text))
    # A space between numbers stays, as "_": "3 4" is not 34.
    return re.sub(r"(?<=[0-9]) (?=[0-9.])", "_", text).replace(" ", "")


def _is_formula(text: str) -> bool:
    """Return whether signs count: there is a digit, a formula's sign, a prime or a minus."""
    if _FORMULA.search(text) or any(
        c.isdigit() or unicodedata.category(c) in ("Sm", "No") for c in text
    ):
        return True
    if re.search(r"(?<![^\W\d_])[^\W\d_]['!\"](?![^\W\d_])|\b[^\W\d_]\(", text):  # A', n!, f(x)
        return True
    for left, right in re.findall(r"([^\W\d_]+)-\s*([^\W\d_]*)", text.casefold()):
        # A hyphen is a minus between short names, x-y, and none in a compound, T-shirt.
        if len(left) + len(right) < 4 or {left, right} & _FUNCTIONS:
            return True
    return False


def _without_enclosures(text: str) -> str:
    """Return a text without the quotes, emphasis or brackets that enclose all of it."""
    for _ in range(4):  # nested marks, as in **"(B)"**; more are no answer
        inner = text
        for opening, closing in _ENCLOSURES:
            between = text[len(opening) : -len(closing)]
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and between.strip()
                and opening not in between
            ):
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
