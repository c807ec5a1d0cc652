r"""Read an answer: the last `\boxed{…}`, one spelling for what LaTeX can spell in many, its unit, its names, its elements."""

import re
from itertools import accumulate

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
        (r"(?:√|(?<![\\a-zA-Z])sqrt) ?(?:\(([^()]*)\)|\{?([0-9]+(?:\.[0-9]+)?|[a-z])\}?)", r"\\sqrt{\1\2}"),
        (
            r"\\\$|\$|\\[()\[\]!]|\\(?:left|right)\.|\\(?:left|right|[bB]igg?[lr]?|(?:display|text)style)(?![a-zA-Z])",
            "",
        ),
        (r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\thinspace(?![a-zA-Z])", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it)|boldsymbol|mbox|operatorname|rm) ?\{([^{}]*)\}", r" \1 "),
        (r"\\(?:thick)?approx(?![a-zA-Z])", r"\\approx "),
        (r"\^ ?\{ ?\\circ ?\}|\^ ?\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\\%| ?percent(?![a-z])", "%"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\(sqrt|frac) ?([0-9]|(?<=frac)[a-z])", r"\\\1{\2}"),
        (r"(\\frac ?\{[^{}]*\}) ?([0-9a-z])", r"\1{\2}"),
        (r" (?:or|and) ", " , "),
        (r" {2,}", " "),
        (r"(^|=) ?([0-9.,]+)m(?= ?(?:\^|$))", r"\1 \2 m"),  # metres, not a product
    )
]
_THOUSANDS = re.compile(r"(?:^|=) ?[+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9,]| [0-9])")

_UNITS = {
    "cm": "cm|centimet(?:er|re)s?", "mm": "mm|millimet(?:er|re)s?", "km": "km|kilomet(?:er|re)s?",
    "m": r"met(?:er|re)s?|(?<=\s)m", "ft": "ft|feet|foot", "inch": "in|inch(?:es)?", "yd": "yd|yards?",
    "mi": "mi|miles?", "degree": "deg|degrees?", "rad": "rad|radians?", "h": "hours?|hrs?", "min": "min|minutes?",
    "s": "sec|seconds?", "dollar": "dollars?", "cent": "cents?", "kg": "kg", "g": "grams?", "lb": "lbs?", "mph": "mph",
    "unit": "units?",
}  # fmt: skip
_UNIT = re.compile(
    r"(?<=[0-9)}\s])\s*(?:(?P<kind>square|sq\.?|cubic|cu\.?)\s+)?"
    rf"(?:{'|'.join(f'(?P<{unit}>{pattern})' for unit, pattern in _UNITS.items())})"
    r"\.?\s*(?:\^\s*\{?\s*(?P<power>[123])\s*\}?)?$"
)

_BOX = re.compile(r"\\boxed\s{0,9}\{")
_ANGLE = re.compile(r"(?:m ?)?\\(?:measured)?angle(?![a-zA-Z])")
_DECORATION = re.compile(
    r"\\(?:overline|widehat|overarc|overset|frown|arc|overrightarrow|vec|triangle|mathcal|operatorname)(?![a-zA-Z])"
    r"|\\(?=(?:alpha|beta|gamma|delta|theta|phi|varphi|omega|lambda|mu|sin|cos|tan)(?![a-zA-Z]))|[{}()|' ]|_ ?[0-9a-zA-Z]"
)
_NAME = re.compile(r"[A-Za-z]{1,40}|∠[A-Za-z0-9]{1,9}|(?:sin|cos|tan)[0-9^\\]+(?:circ)?")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]*)?) ?\^\\circ ?")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)|\\approx ")
_COMMA = re.compile(r"[,;](?![^(\[{]*[)\]}])")  # outside of brackets


def last_boxed(text: str, max_length: int) -> str | None:
    r"""The content of the last `\boxed{…}`; None if it is missing, unbalanced, empty or longer than `max_length`."""
    head = _BOX.match(text, max(0, text.rfind("\\boxed")))
    if head is None:
        return None
    depth, rest = 1, text[head.end() : head.end() + max_length + 1]
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # an escaped brace is no brace
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            box = rest[: brace.start()]
            return box if box.strip() else None
    return None


def normalise(text: str) -> str:
    r"""One spelling: typesetting and dollar signs gone, `\frac12` → `\frac{1}{2}`, √ → `\sqrt`, 1,440 → 1440, text unwrapped."""
    text = text.translate(_CHARACTERS)
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    text = text.strip().removesuffix(".").strip()
    while text.startswith("{") and 0 not in depths(text)[:-1]:
        text = text[1:-1].strip()
    return _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), text)


def split_unit(text: str) -> tuple[str, str | None]:
    r"""(value, canonical unit): `12 square inches` → ("12", "inch^2"), `25%` → ("25", "%"); `12 units` → ("12", None)."""
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    if re.search(r"\\(?:sin|cos|tan)(?![a-zA-Z])", text):  # a trailing degree belongs to the argument
        return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text), None
    if text.endswith("^\\circ"):
        return text.removesuffix("^\\circ").strip(), "degree"
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return text, None
    unit = next(unit for unit in _UNITS if match[unit])
    power = {"s": "2", "c": "3"}.get((match["kind"] or " ")[0], match["power"] or "1")
    return text[: match.start()].strip(), None if unit == "unit" else unit if power == "1" else f"{unit}^{power}"


def split_equation(text: str) -> tuple[list[str], list[str]]:
    r"""(names, values) of a chain of equalities: `m\angle A = 2x = 30` → (["∠A"], ["2x", "30"])."""
    parts = [part.strip() for part in _EQUALS.split(text)]
    parts = parts[1:] if not parts[0] and len(parts) > 1 else parts  # `= 7`
    letters = [_DECORATION.sub("", _ANGLE.sub("∠", part)) for part in parts]
    named = [len(parts) > 1 and _NAME.fullmatch(name) is not None for name in letters]
    values = [part for part, is_name in zip(parts, named, strict=True) if not is_name] or parts[-1:]
    return [name.removeprefix("∠") for name, is_name in zip(letters, named, strict=True) if is_name], values


def split_list(text: str) -> tuple[str, list[str]]:
    r"""(brackets, elements): `(1,2]` → ("(]", …), ordered; `1, 2`, `\{1,2\}` and `2 \pm 1` → ("", …), a set; `x` → ("", ["x"])."""
    brackets, inner = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and 0 not in depths(text)[:-1]:
        brackets, inner = text[0] + text[-1], text[1:-1]
    elements = [element.strip() for element in _COMMA.split(inner)]
    if len(elements) > 1:
        return brackets, elements
    return "", [text.replace("\\pm", sign) for sign in "+-"] if text.count("\\pm") == 1 else [text]


def depths(text: str) -> list[int]:
    """How many brackets are open behind each character, any kind closing any."""
    return list(accumulate((c in "([{") - (c in ")]}") for c in text))
