r"""Reading an answer: the last `\boxed{…}`, one spelling for what LaTeX can spell in many, units, names, lists."""

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/",
        "°": r"^\circ ", "∠": r"\angle ", "△": r"\triangle ", "≈": r"\approx ", "±": r"\pm ", "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty ",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "，": ",",
        "。": ".", "％": "%", "\n": " ", "\t": " ",
    }
)  # fmt: skip

_REWRITES = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"√ ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√ ?\{?([0-9]+|[a-z])\}?", r"\\sqrt{\1}"),
        (r"\\\$|\$|\\[()\[\]]", ""),
        (r"\\(?:left|right)\.|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])", ""),
        (r"\\!", ""),
        (r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\thinspace(?![a-zA-Z])", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:text|mathrm|textrm|textbf|textit|mathbf|mathit|mbox|operatorname|rm) ?\{([^{}]*)\}", r" \1 "),
        (r"\\(?:thick)?approx(?![a-zA-Z])", r"\\approx "),
        (r"\^ ?\{ ?\\circ ?\}|\^ ?\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\\%", "%"),
        (r"(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\sqrt ?([0-9])", r"\\sqrt{\1}"),
        (r"\\frac ?([0-9a-z])", r"\\frac{\1}"),
        (r"(\\frac ?\{[^{}]*\}) ?([0-9a-z])", r"\1{\2}"),
        (r" (?:or|and) ", " , "),
        (r" {2,}", " "),
    )
]

_LENGTHS = "cm|mm|km|ft|feet|foot|inch(?:es)?|in|yd|yards?|mi|miles?|(?:centi|milli|kilo)?met(?:er|re)s?|units?"
_OTHERS = "deg(?:rees?)?|rad(?:ians?)?|percent|dollars?|cents?|hours?|hrs?|minutes?|min|seconds?|sec|kg|grams?|lbs?|mph"
_UNIT = re.compile(
    rf"(?<=[0-9)}}\s])\s*(?:(?P<kind>square|sq\.?|cubic|cu\.?)\s+)?(?P<name>{_LENGTHS}|{_OTHERS}|(?<=\s)m)\.?"
    r"\s*(?:\^\s*\{?\s*(?P<power>[123])\s*\}?)?$"
)
_CANONICAL = [
    (re.compile(pattern), unit)
    for pattern, unit in (
        (r"m|met(er|re)s?", "m"), (r"cm|centimet(er|re)s?", "cm"), (r"mm|millimet(er|re)s?", "mm"),
        (r"km|kilomet(er|re)s?", "km"), (r"ft|feet|foot", "ft"), (r"in|inch(es)?", "in"), (r"yd|yards?", "yd"),
        (r"mi|miles?", "mi"), (r"deg(rees?)?", "degree"), (r"rad(ians?)?", "rad"),
        ("percent", "%"), (r"hours?|hrs?", "h"), (r"minutes?|min", "min"), (r"seconds?|sec", "s"),
    )
]  # fmt: skip

_DECORATION = re.compile(
    r"\\(?:overline|widehat|overarc|overset|frown|arc|overrightarrow|vec|angle|measuredangle|triangle|mathcal|operatorname)"
    r"(?![a-zA-Z])|[{}()|' ]|_ ?[0-9a-zA-Z]"
)
_GREEK = re.compile(r"\\(alpha|beta|gamma|delta|theta|phi|varphi|omega|lambda|mu)(?![a-zA-Z])")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan)(?![a-zA-Z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]*)?) ?\^\\circ ?")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)|\\approx ")


def last_boxed(text: str, max_length: int) -> str | None:
    r"""What stands in the last `\boxed{…}`, braces balanced.

    None if there is no box, the last one is unbalanced or empty, or it holds more than `max_length` characters.
    """
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    head = re.compile(r"\\boxed\s{0,9}\{").match(text, start)
    if head is None:
        return None
    depth, i, begin = 1, head.end(), head.end()
    while i < len(text) and i - begin <= max_length:
        if text[i] == "\\":
            i += 1  # an escaped brace is no brace
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[begin:i].strip() or None
        i += 1
    return None


def normalise(text: str) -> str:
    r"""One spelling: typesetting and dollar signs gone, `\frac12` → `\frac{1}{2}`, √ → `\sqrt`, text unwrapped…"""
    text = text.translate(_CHARACTERS)
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    text = text.strip().removesuffix(".").strip()
    while text.startswith("{") and _closing(text) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def key(text: str) -> str:
    """For comparison as a string: without case or spaces, but for those that keep two numbers apart."""
    return re.sub(r"(?<![0-9]) +| +(?![0-9])", "", text).casefold()


def split_unit(text: str) -> tuple[str, str | None]:
    r"""(value, unit) with the unit's name made canonical: `12 square inches` → ("12", "in^2"), `25%` → ("25", "%").

    "units" and "square units" name none: the unit is None.
    """
    text = text.strip()
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    if _TRIGONOMETRIC.search(text):  # a trailing degree belongs to the argument
        return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text), None
    if text.endswith("^\\circ"):
        return text.removesuffix("^\\circ").strip(), "degree"
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return text, None
    if match["name"].startswith("unit"):
        return text[: match.start()].strip(), None
    unit = next((unit for pattern, unit in _CANONICAL if pattern.fullmatch(match["name"])), match["name"].rstrip("s"))
    power = {"s": "2", "c": "3"}.get((match["kind"] or " ")[0], match["power"] or "1")
    return text[: match.start()].strip(), unit if power == "1" else f"{unit}^{power}"


def split_equation(text: str) -> tuple[list[str], list[str]]:
    r"""(names, values) of a chain of equalities: `m\angle A = 2x = 30` → (["mA"], ["2x", "30"])."""
    parts = [part.strip() for part in _EQUALS.split(text)]
    parts = parts[1:] if not parts[0] and len(parts) > 1 else parts  # `= 7`
    if len(parts) == 1:
        return [], parts
    values = [part for part in parts if _name(part) is None] or parts[-1:]
    return [name for part in parts if part not in values and (name := _name(part))], values


def split_list(text: str) -> tuple[str, list[str]] | None:
    r"""(brackets, elements) of a list: `(1,2]` → ("(]", …), ordered; `1, 2`, `\{1,2\}` and `2 \pm 1` → ("", …), a set.

    None for a single value.
    """
    brackets, inner = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
    elif text[:1] in "([" and text[-1:] in ")]" and _closing(text) == len(text) - 1:
        brackets, inner = text[0] + text[-1], text[1:-1]
    elements, depth, start = [], 0, 0
    for i, c in enumerate(inner):
        depth += (c in "([{") - (c in ")]}")
        if c in ",;" and depth == 0:
            elements.append(inner[start:i].strip())
            start = i + 1
    elements.append(inner[start:].strip())
    if len(elements) == 1 and text.count("\\pm") == 1:
        return "", [text.replace("\\pm", sign) for sign in "+-"]
    return (brackets, elements) if len(elements) > 1 else None


def _name(text: str) -> str | None:
    """The letters of what could be the name of a quantity (`x`, `AB`, `m∠A`, `length of AB`); None for others."""
    if _TRIGONOMETRIC.match(text):
        return re.sub(r"[^A-Za-z0-9]", "", text) if re.fullmatch(r"\\[a-z]+[({ ]*[0-9A-Za-z\\^]+[)} ]*", text) else None
    letters = _GREEK.sub(r"\1", _DECORATION.sub("", text))
    return letters if re.fullmatch(r"[A-Za-z]{1,40}", letters) else None


def _closing(text: str) -> int:
    """Position of the bracket that closes the one `text` begins with, any kind closing any; -1 if none does."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return i
    return -1
