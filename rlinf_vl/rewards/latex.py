r"""The reading of an answer: its last `\boxed{…}`, one spelling for many of LaTeX, its elements."""

import re
from itertools import accumulate

#: Character → its spelling in ASCII or LaTeX. A space ends a command, so that no letter joins it.
_SPELLINGS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "―": "-", "﹣": "-", "π": r"\pi ",
    "×": r"\times ", "✕": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "•": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "∶": ":", "°": r"^\circ ",
    "˚": r"^\circ ", "º": r"^\circ ", "∘": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F",
    "∠": r"\angle ", "△": r"\triangle ", "≈": r"\approx ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ",
    "≦": r"\le ", "≧": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\neq ", "∞": r"\infty ",
    "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "Ω": "Ω", "μ": "µ",
    "´": "'", "′": "'", "\u00a0": " ", "\u3000": " ", "。": ".", "、": ",", "\n": " ", "\t": " ",
} | {
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}",
    "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}",
    "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
}  # fmt: skip
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_CHARACTERS = str.maketrans(
    _SPELLINGS | dict.fromkeys(map(chr, range(0x2000, 0x200B)), " ") | {"\u202f": " "}
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?")

_MATRIX = re.compile(
    r"(?:\\left)?[\[(]? ?\\begin ?\{(?P<kind>[pb]?matrix|array)\} ?(?:\{[lcr| ]{1,20}\})?"
    r"(?P<cells>(?:(?!\\(?:begin|end)(?![a-z])).)*)\\end ?\{(?P=kind)\} ?(?:\\right)?[\])]?"
)
#: (substring, pattern, replacement), applied in this order. A pattern can't match a text without
#: the substring, and a search for the substring is much faster.
_REWRITES = [
    (substring, re.compile(pattern), replacement)
    for substring, pattern, replacement in (
        ("*", r"\*\*([^*]+)\*\*", r"\1"),
        ("√", r"√ ?(?:\(([^()]*)\)|\{?([0-9]+(?:\.[0-9]+)?|[a-z])\}?)", r"\\sqrt{\1\2}"),
        (
            "sqrt",
            r"(?<![\\a-zA-Z])sqrt ?(?:\(([^()]*)\)|\{?([0-9]+(?:\.[0-9]+)?|[a-z])\}?)",
            r"\\sqrt{\1\2}",
        ),
        ("\\", r"(?<!\\)\\[()\[\]!]", ""),
        (
            "\\",
            r"\\(?:left|right)\.|\\(?:left|right|[bB]igg?[lr]?|(?:display|text)style)(?![a-zA-Z])",
            "",
        ),
        ("\\", r"(?<!\\)\\[,;: ]", " "),
        ("~", "~", " "),
        ("\\", r"\\(?:q?quad|thinspace)(?![a-zA-Z])", " "),
        ("{,}", r"\{,\}", ","),
        ("*", r" ?\*\* ?", "^"),
        ("*", r" ?\* ?", r"\\cdot "),
        ("frac", r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        ("\\", r"\\(?:Omega|ohm)(?![a-zA-Z])", "Ω"),
        ("\\m", r"\\(?:mu|micro)(?![a-zA-Z]) ?(?=[a-zA-Z]|\\(?:text|math))", "µ"),
        ("\\euro", r"\\euro(?![a-zA-Z])", "€"),
        ("\\celsius", r"\\celsius(?![a-zA-Z])", r"^\\circ C"),
        ("deg", r"\\(?:text)?degree(?![a-zA-Z])", r"^\\circ "),
        ("^", r"\^ ?\{ ?\\(?:circ|text(?:rm)? ?\{o\}) ?\}|\^ ?\\circ(?![a-zA-Z])", r"^\\circ "),
        ("^", r"(?<=[0-9]) ?\^ ?(?:\{ ?o ?\}|o(?![a-zA-Z]))", r"^\\circ "),
        ("\\text", r"\^ ?\{? ?\\text ?\{ ?([1-4]) ?\} ?\}?", r"^\1"),
        (
            "{",
            r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it)|boldsymbol|mbox|operatorname|rm) ?\{([^{}]*)\}",
            r" \1 ",
        ),
        ("{", r"\\(?:text(?:rm)?|math(?:rm|bf)) ?\{([^{}]*\{[^{}]*\}[^{}]*)\}", r" \1 "),
        ("approx", r"\\(?:thick)?approx(?![a-zA-Z])", r"\\approx "),
        ("\\g", r"\\(?:geqslant|geq)(?![a-zA-Z])", r"\\ge "),
        ("\\l", r"\\(?:leqslant|leq)(?![a-zA-Z])", r"\\le "),
        ("\\lbrace", r"\\lbrace(?![a-zA-Z])", r"\\{"),
        ("\\rbrace", r"\\rbrace(?![a-zA-Z])", r"\\}"),
        ("\\langle", r"\\langle(?![a-zA-Z]) ?", "("),
        ("\\rangle", r" ?\\rangle(?![a-zA-Z])", ")"),
        ("\\", r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}", r"\\emptyset "),
        ("%", r"\\%", "%"),
        ("cent", r" ?per ?cent(?![a-z])", "%"),
        ("pi", r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        ("infinity", r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
        ("\\infty", r"(^|[(\[,;=]) ?\+ ?\\infty", r"\1\\infty"),
        ("\\", r"\\(sqrt|frac) ?([0-9]|(?<=frac)[a-z])", r"\\\1{\2}"),
        ("\\frac", r"(\\frac ?\{[^{}]*\}) ?([0-9a-z])", r"\1{\2}"),
        ("log", r"(?<![a-zA-Z\\])log(?=_)", r"\\log"),
        (
            "\\log",
            r"\\log ?_ ?(?:\{ ?([0-9a-z]{1,4}) ?\}|([0-9a-z])) ?(?:\{([0-9.]{1,30})\}|([0-9.]{1,30}))",
            r"\\log_{\1\2}(\3\4)",
        ),
        ("\\in", r"^ ?\{? ?([a-zA-Z]) ?\}? ?\\in(?![a-zA-Z]) ?(?=[(\[])", r"\1="),
        (" or ", ",? or ", " , "),
        ("  ", " {2,}", " "),
        ("m", r"(^|=) ?([0-9.,]+)m(?= ?(?:\^|$))", r"\1 \2 m"),  # metres, not a product
    )
]
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![a-zA-Z])")
_RELATION = re.compile(r"(<=?|>=?|\\[lg]e(?![a-zA-Z]))")
_SIGNS = {"<": "<", ">": ">", "<=": "<=", ">=": ">=", "\\le": "<=", "\\ge": ">="}
_VARIABLE = re.compile(r"[a-zA-Z](?:_[0-9a-z])?|\\(?:theta|alpha|beta)")
#: Digits in groups of three, with commas or spaces, at the start of a value.
_THOUSANDS = re.compile(
    r"(?:^|=|[$€£¥₹]) ?[+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9,]| [0-9])"
)

_BOX = re.compile(r"\\boxed\s{0,9}\{")
_ANGLE = re.compile(r"(?:m ?)?\\(?:measured)?angle(?![a-zA-Z])")
#: Marks around or above the letters of a name, which don't tell one name from another.
_DECORATION = re.compile(
    r"\\(?:overline|widehat|overarc|overset|frown|arc|overrightarrow|vec|triangle|mathcal"
    r"|operatorname)(?![a-zA-Z])"
    r"|\\(?=(?:alpha|beta|gamma|delta|theta|phi|varphi|omega|lambda|mu|sin|cos|tan)(?![a-zA-Z]))"
    r"|[{}()|' ]"
)
#: A name of a quantity: `AB`, `x_1`, `A,B`, `∠ABC`, `sin30`.
_NAME = re.compile(
    r"[A-Za-z]{1,40}(?:_[0-9A-Za-z]{1,4})?|[A-Za-z](?:,[A-Za-z]){1,3}|∠[A-Za-z0-9]{1,9}"
    r"|(?:sin|cos|tan)[0-9^\\]+(?:circ)?"
)
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)|\\approx ")
_COMMA = re.compile(r"[,;](?![^(\[{]*[)\]}])")  # outside of brackets


def last_boxed(text: str, max_length: int) -> str | None:
    r"""Return the content of the last `\boxed{…}`.

    Return None if it is missing, unbalanced, empty or longer than `max_length` characters.
    """
    head = _BOX.match(text, max(0, text.rfind("\\boxed")))
    if head is None:
        return None
    depth, content = 1, text[head.end() : head.end() + max_length + 1]
    for brace in re.finditer(r"\\.|[{}]", content, re.DOTALL):  # an escaped brace does not count
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            box = content[: brace.start()]
            return box if box.strip() else None
    return None


def normalise(text: str) -> str:
    r"""Return an answer in one spelling.

    Typesetting is removed and text unwrapped; `\frac12` → `\frac{1}{2}`, √ → `\sqrt`,
    1,440 → 1440, `\$` → `$`.
    A matrix becomes `\matrix{a&b;c&d}`, whatever its brackets.
    """
    if _PLAIN_NUMBER.fullmatch(text):
        return text
    if not text.isascii():
        text = text.translate(_FULL_WIDTH).translate(_CHARACTERS)
        text = re.sub("[⁰¹²³⁴-⁹⁻⁺]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
        text = re.sub("[₀-₉]+", lambda match: f"_{{{match[0].translate(_LOWERED)}}}", text)
        text = re.sub(r"\^\{([0-9])\}", r"^\1", text)
    text = text.replace("\n", " ").replace("\t", " ")
    if "\\begin" in text:
        text = _MATRIX.sub(_matrix, text)
    text = _without_math_mode(text)
    for substring, pattern, replacement in _REWRITES:
        if substring in text:
            text = pattern.sub(replacement, text)
    if " and " in text and not _INEQUALITY.search(text):  # "x > 1 and x < 2" is one answer
        text = re.sub(",? and ", " , ", text)
    text = text.strip().removesuffix(".").strip()
    # Braces around all of the text: no bracket closes the first one before the end.
    while text.startswith("{") and 0 not in depths(text)[:-1]:
        text = text[1:-1].strip()
    if "," in text or " " in text:
        text = _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), text).strip()
    return text


def _matrix(match: re.Match[str]) -> str:
    """Return a matrix environment in our spelling; a final row break is dropped."""
    rows = [row.strip() for row in re.split(r"\\\\|\\cr(?![a-z])", match["cells"])]
    rows = rows[:-1] if len(rows) > 1 and not rows[-1] else rows
    return rf"\matrix{{{';'.join(rows)}}}"


def _without_math_mode(text: str) -> str:
    r"""Return a text without the dollar signs of math mode.

    Those of money stay: `\$5`, and a single one before or after a number.
    """
    if "$" not in text or "\x01" in text:
        return text
    text = text.replace("\\$", "\x01")  # \x01 stands for a dollar of money until the end
    if text.count("$") == 1:
        text = re.sub(r"^(\s*[+-]?\s*(?:US ?)?)\$(?=\s*[+-]?[0-9.])", "\\1\x01", text)
        text = re.sub(r"(?<=[0-9])\s*\$\s*$", "\x01", text)
    return text.replace("$", "").replace("\x01", "$")


def split_matrix(text: str) -> list[list[str]] | None:
    r"""Return the cells of a normalised matrix row by row; None for anything else.

    `\matrix{1&2;3&4}` → [["1", "2"], ["3", "4"]].
    """
    if (
        not text.startswith("\\matrix{")
        or not text.endswith("}")
        or 0 in depths(text)[len("\\matrix{") : -1]
    ):
        return None
    rows: list[list[str]] = []
    for row in text[len("\\matrix{") : -1].split(";"):
        rows.append([cell.strip() for cell in row.split("&")])
    return rows


def split_equation(text: str) -> tuple[list[str], list[str]]:
    r"""Return the names and the values in a chain of equalities.

    `m\angle A = 2x = 30` → (["∠A"], ["2x", "30"]). A chain of names alone has no value.
    """
    parts = [part.strip() for part in _EQUALS.split(text)]
    parts = parts[1:] if not parts[0] and len(parts) > 1 else parts  # `= 7`
    letters = [_DECORATION.sub("", _ANGLE.sub("∠", part)) for part in parts]
    are_names = [len(parts) > 1 and _NAME.fullmatch(name) is not None for name in letters]
    values = [part for part, is_name in zip(parts, are_names, strict=True) if not is_name]
    return [
        name.removeprefix("∠") for name, is_name in zip(letters, are_names, strict=True) if is_name
    ], values


def split_list(text: str) -> tuple[str, list[str]]:
    r"""Return the brackets and the elements of a list.

    `(1,2]` → ("(]", …) is ordered; `1, 2`, `\{1,2\}` and `2 \pm 1` → ("", …) are sets;
    `x` → ("", ["x"]).
    """
    brackets, inner = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and 0 not in depths(text)[:-1]:
        brackets, inner = text[0] + text[-1], text[1:-1]
    elements = [element.strip() for element in _COMMA.split(inner)]
    if len(elements) > 1:
        return brackets, elements
    return "", [text.replace("\\pm", sign) for sign in "+-"] if text.count("\\pm") == 1 else [text]


def split_union(text: str) -> list[str]:
    r"""Return the sets of a union, each in brackets: `(0,1) \cup [2,3)`.

    Return the text alone if it is no union.
    """
    sets = [part.strip() for part in text.split("\\cup")]
    return (
        sets
        if all(part[:1] in ("(", "[", "\\") and part[-1:] in (")", "]", "}") for part in sets)
        else [text]
    )


def split_inequality(text: str) -> tuple[str, str] | None:
    r"""Return the variable and the interval of an inequality; None for anything else.

    `1 < x \le 2` → ("x", "(1,2]"), `x > 3` and `3 < x` → ("x", "(3,\infty)").
    """
    if not _INEQUALITY.search(text):
        return None
    parts = [part.strip() for part in _RELATION.split(text)]
    bounds, signs = parts[::2], [_SIGNS[sign] for sign in parts[1::2]]
    if all(sign[0] == ">" for sign in signs):  # read it from right to left
        bounds, signs = bounds[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    if not all(sign[0] == "<" for sign in signs):
        return None
    if len(bounds) == 2:
        is_upper = _VARIABLE.fullmatch(bounds[0]) is not None
        bounds = ["-\\infty", *bounds] if is_upper else [*bounds, "\\infty"]
        signs = ["<", *signs] if is_upper else [*signs, "<"]
    if len(bounds) != 3 or not _VARIABLE.fullmatch(bounds[1]):
        return None
    low, variable, high = bounds
    # A variable that is also in a bound, x < 2x, is no interval.
    if not low or not high or variable in re.sub(r"\\[a-zA-Z]+", "", low + high):
        return None
    return (
        variable,
        f"{'[' if signs[0] == '<=' else '('}{low},{high}{']' if signs[1] == '<=' else ')'}",
    )


def depths(text: str) -> list[int]:
    """Return the number of open brackets after each character; any kind closes any other."""
    return list(accumulate((c in "([{") - (c in ")]}") for c in text))
