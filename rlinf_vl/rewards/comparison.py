r"""The rules by which two answers, normalised by `rlinf_vl.rewards.latex`, are the same.

Equal strings and equal numbers are the same. These are ignored: the name of the quantity
(`AB = 12`, `m\angle A = 30`), and units and degrees, unless both sides have one and they differ. A
per cent sign may be left out like a unit but not added: 25 % is neither 25 nor 0.25, nor is 0.25
25 %. Every link of a chain of equalities must be the answer. Lists without brackets and sets match
in any order, tuples and intervals only in their own; an inequality is its interval.

Integers, fractions, repeating decimals and closed forms are exact: 7 is never right for 7.2, 500
for 5, nor 1999.5 for 1999. A decimal may be a rounding:

- A *reference* decimal of two or more significant digits stands for all numbers within half a unit
  of its last place, both ends included: 8.66 for 5√3, 8.6603 and 8.655, not for 8.7. One of a
  single digit (0.6) stands for itself.
- A *response's* decimal is right for an exact answer that is no integer if it is that answer
  rounded to the digits shown and shows at least three significant ones: 17.3 for 10√3; 8.7 for 5√3
  is wrong.
- The last place of 6.02e23 is that of its 2. With three or more digits it is a decimal; with fewer,
  or none after the point, it stands for itself.

math-verify parses formulas, and compares those with variables. All else is compared here, since
`math_verify.verify` 0.9.0 pays 53 of the 369 wrong boxes of `tests/unit/rewards/corpus/math.jsonl`
(5 km for 5 m, 6t for 6, (2,3) for {2,3}) and refuses 147 of the 354 right ones.
"""

import logging
import re
from dataclasses import dataclass
from fractions import Fraction

from rlinf_vl.rewards.latex import (
    depths,
    split_equation,
    split_inequality,
    split_list,
    split_matrix,
    split_union,
)
from rlinf_vl.rewards.units import split_unit

#: Longest list that is compared, in elements.
MAX_ELEMENTS = 8
#: Largest matrix that is compared, in cells.
MAX_CELLS = 16
#: Deepest nesting of brackets that is compared: math-verify's parser takes far longer with each.
MAX_NESTING = 12
#: Largest relative difference of equal closed forms, which are evaluated to 30 digits.
_TOLERANCE = Fraction(1, 10**12)

#: An integer or decimal, with a repeating part or a power of ten or without.
_DECIMAL = re.compile(
    r"([+-]?)([0-9]*)(?:\.([0-9]*)(?:\\overline ?\{([0-9]+)\})?)?"
    r"(?:[eE]([+-]?[0-9]{1,3})"
    r"| ?(?:\\times|\\cdot|\*|x) ?10 ?(?:\^|\*\*) ?\{? ?([+-]?[0-9]{1,3}) ?\}?)?"
)
_POWER_OF_TEN = re.compile(r"([+-]?)10 ?\^ ?\{? ?([+-]?[0-9]{1,3}) ?\}?")
_SCIENTIFIC = re.compile("[0-9.][eE]")
#: A fraction or mixed number: `3 1/2`, `\frac{7}{2}`, `3\frac{1}{2}`.
_FRACTION = re.compile(
    r"([+-]?) ?(?:(?:([0-9]+) )?([0-9]+) ?/ ?([0-9]+)"
    r"|([0-9]*) ?\\frac ?\{ ?([+-]?[0-9]+) ?\} ?\{ ?([+-]?[0-9]+) ?\})"
)

#: The letter of an option with its text or without: `C`, `(C)`, `C. 12 cm`.
_OPTION = re.compile(r"\(?(?P<letter>[A-J])(?:\)[.:]?|[.:])?(?:(?<=[).:]) +(?P<text>.+))?")
_POINT = re.compile(r"([A-Z])'? ?([(].*[)])")
_CLOCK = re.compile(r"[0-9]{1,2} ?: ?[0-5][0-9]")
#: Texts that are no formula: words, signs only, two numbers side by side, or foreign characters.
_NO_FORMULA = re.compile(
    r"^[A-Za-z ]{2,}$|^[^A-Za-z0-9]*$|[0-9] +[0-9]|[0-9] *_|__|'''|[^\x00-\x7f]|[$&]"
)

# math-verify warns that it has no time limit; the worker process has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class NeedsAlgebra(Exception):
    """The answers are formulas, which only a call with `algebra` may compare."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number with the precision in which it was written.

    Attributes:
        value: the exact number.
        unit: the value of one in its last place, if it may be a rounding; None: it is exact.
        digits: the number of significant digits.
    """

    value: Fraction
    unit: Fraction | None = None
    digits: int = 0


def same(response: str, answer: str, *, algebra: bool) -> bool:
    """Return whether two answers are the same.

    Without algebra it is quick; with it, it may take any time and memory.

    Raises:
        NeedsAlgebra: the answers are formulas, and `algebra` is False.
    """
    if not response or not answer:
        return False
    quick_verdict = _same_at_sight(response, answer)
    if quick_verdict is not None:
        return quick_verdict
    if max(depths(response) + depths(answer)) > MAX_NESTING:
        return False
    for compare, mark in _COMPARISONS:
        if mark is None or mark.search(response) or mark.search(answer):
            verdict = compare(response, answer, algebra)
            if verdict is not None:
                return verdict
    return _same_list(response, answer, algebra)


def _same_at_sight(response: str, answer: str) -> bool | None:
    """Return whether two equal strings or two numbers are the same; None for all other texts.

    Different numbers are None, too, where 2e-1 may be a formula with e.
    """
    if _key(response) == _key(answer):
        return True
    response_number, answer_number = parse_number(response), parse_number(answer)
    if response_number is None or answer_number is None:
        return None
    return same_number(response_number, answer_number) or (
        None if _SCIENTIFIC.search(f"{response} {answer}") else False
    )


def _key(text: str) -> str:
    """Return a text without spaces, except between numbers, and without case if it is a word."""
    key = re.sub(r"(?<![0-9]) +| +(?![0-9])", "", text) if " " in text else text
    return key.casefold() if key.isalpha() else key


def _same_option(response: str, answer: str, algebra: bool) -> bool | None:
    """Compare where the reference is an option: its letter, `C` or `(C)`, or both, `C. 12 cm`."""
    answer_match = _OPTION.fullmatch(answer)
    if answer_match is None or not (answer_match["text"] or len(answer) <= 4):
        return None
    response_match = _OPTION.fullmatch(response)
    if response_match is None:
        return _same_list(response, answer_match["text"], algebra) if answer_match["text"] else None
    if response_match["letter"] != answer_match["letter"]:
        return False
    if response_match["text"] and answer_match["text"]:
        return _same_list(response_match["text"], answer_match["text"], algebra)
    return True


def _same_ratio(response: str, answer: str, algebra: bool) -> bool:
    """Compare where either side is a ratio, `3:4`.

    A reference such as 1:15 may be a time of day, so 3:45 is not the same, nor is a fraction.
    """
    answer_terms = [parse_number(term.strip()) for term in answer.split(":")]
    response_terms = [parse_number(term.strip()) for term in response.split(":")]
    if None in answer_terms or None in response_terms or len(answer_terms) < 2:
        return False
    is_clock = _CLOCK.fullmatch(answer) is not None
    a = [term.value for term in response_terms if term is not None]
    b = [term.value for term in answer_terms if term is not None]
    # A fraction may answer a ratio of two terms, but a decimal shows no terms.
    if len(a) == 1 and len(b) == 2:
        return (
            not is_clock
            and b[1] != 0
            and "/" in response.replace("\\frac", "/")
            and a[0] * b[1] == b[0]
        )
    if len(a) != len(b):
        return False
    if is_clock or not all(a + b):
        return a == b
    return all(x * b[0] == y * a[0] for x, y in zip(a, b, strict=True))


def _same_matrix(response: str, answer: str, algebra: bool) -> bool | None:
    """Compare where either side is a matrix, cell by cell."""
    response_rows, answer_rows = split_matrix(_value(response)), split_matrix(_value(answer))
    if response_rows is None or answer_rows is None:
        return None if response_rows is answer_rows else False
    row_lengths = [len(row) for row in answer_rows]
    if [len(row) for row in response_rows] != row_lengths or sum(row_lengths) > MAX_CELLS:
        return False
    return all(
        same(response_cell, answer_cell, algebra=algebra)
        for response_row, answer_row in zip(response_rows, answer_rows, strict=True)
        for response_cell, answer_cell in zip(response_row, answer_row, strict=True)
    )


def _value(text: str) -> str:
    """Return a text without the name of a matrix, `A = …`."""
    return re.sub(r"^[A-Za-z] ?= ?(?=\\matrix)", "", text)


def _same_sets(response: str, answer: str, algebra: bool) -> bool | None:
    """Compare where either side is an inequality or a union of intervals.

    Several inequalities are a union.
    """
    response_sets, answer_sets = _sets(response), _sets(answer)
    if response_sets is None and answer_sets is None:
        return None
    # An interval for the inequality, or the reverse.
    if response_sets is None or answer_sets is None:
        interval = response if response_sets is None else answer
        sets = response_sets or answer_sets
        brackets, ends = split_list(interval)
        if sets is None or len(sets) != 1 or len(ends) != 2 or not brackets:
            return None if "\\cup" not in response + answer else False
        if answer_sets is None and brackets == "()" and "\\infty" not in interval:
            return False  # the reference may be a point
        response_sets = response_sets or [("", interval)]
        answer_sets = answer_sets or [("", interval)]
    if len(response_sets) != len(answer_sets) or len(answer_sets) > MAX_ELEMENTS:
        return False
    if len({name for name, _ in response_sets + answer_sets} - {""}) > 1:
        return None if len(answer_sets) == 1 else False
    for _, answer_set in answer_sets:
        index = next(
            (
                i
                for i, (_, response_set) in enumerate(response_sets)
                if _same_list(response_set, answer_set, algebra)
            ),
            None,
        )
        if index is None:
            return False
        response_sets = response_sets[:index] + response_sets[index + 1 :]
    return True


def _sets(text: str) -> list[tuple[str, str]] | None:
    """Return the variable, or "", and the interval of each set; None if there are no sets.

    The text is a union, or inequalities that are joined by "or".
    """
    sets = split_union(text)
    if len(sets) > 1:
        return [("", interval) for interval in sets]
    inequalities = [split_inequality(part) for part in split_list(text)[1]]
    return None if None in inequalities else [pair for pair in inequalities if pair is not None]


#: Comparisons for special kinds of answers, in this order, each with the mark of its kind in either
#: text (None: try always). A comparison returns None where the answers are not of its kind.
_COMPARISONS = [
    (_same_option, None),
    (_same_ratio, re.compile(":")),
    (_same_matrix, re.compile(r"\\matrix")),
    (_same_sets, re.compile(r"[<>]|\\[lg]e(?![a-zA-Z])|\\cup")),
]


def _same_list(response: str, answer: str, algebra: bool) -> bool:
    """Compare lists element by element, points by their coordinates, and single values."""
    response_brackets, response_elements = split_list(response)
    answer_brackets, answer_elements = split_list(answer)
    if response_brackets != answer_brackets:
        response_point, response_tuple = _split_point(response)
        answer_point, answer_tuple = _split_point(answer)
        if not response_point and not answer_point:
            return _same_equation(response, answer, algebra) if "=" in response + answer else False
        return _same_list(response_tuple, answer_tuple, algebra)
    if len(response_elements) != len(answer_elements) or len(response_elements) > MAX_ELEMENTS:
        return False
    if len(response_elements) == 1:
        response_point, response_tuple = _split_point(response)
        answer_point, answer_tuple = _split_point(answer)
        if response_point and answer_point:
            return response_point == answer_point and _same_list(
                response_tuple, answer_tuple, algebra
            )
        return _same_equation(response, answer, algebra)
    for answer_element in answer_elements:
        # An ordered list must match in order, so only its first remaining element is a candidate.
        candidates = response_elements[:1] if response_brackets else response_elements
        match = next(
            (element for element in candidates if same(element, answer_element, algebra=algebra)),
            None,
        )
        if match is None:
            return False
        response_elements.remove(match)
    return True


def _split_point(text: str) -> tuple[str, str]:
    """Return the name and the coordinates of a point, `P(2,3)`; ("", text) for anything else."""
    match = _POINT.fullmatch(text)
    return (match[1], match[2]) if match and len(split_list(match[2])[1]) > 1 else ("", text)


def _same_equation(response: str, answer: str, algebra: bool) -> bool:
    """Compare values, chains of equalities, and equations with variables."""
    response_names, response_values = split_equation(response)
    answer_names, answer_values = split_equation(answer)
    # x = y is y = x.
    if response_names and answer_names and not response_values and not answer_values:
        return {_reading(name) for name in response_names} == {
            _reading(name) for name in answer_names
        }
    if not response_values and not answer_names and re.fullmatch("[A-Z]", response_names[0]):
        return False  # A = B names two options or two lengths, and no value
    # In x = A both sides are names, and the last one is the value.
    response_values = response_values or response_names[-1:]
    answer_values = answer_values or answer_names[-1:]
    is_equation = len(answer_values) > 1 and not answer_names
    if is_equation or (answer_names and len(response_values) > 1 and not response_names):
        return len(response_values) + len(response_names) > 1 and _same_formula(
            response, answer, algebra
        )
    if response_names and answer_names and not _share_name(response_names, answer_names):
        is_line = all(
            re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", values[-1])
            for values in (response_values, answer_values)
        )
        return (
            is_line
            and len(response_values) == len(answer_values) == 1
            and _same_formula(response, answer, algebra)
        )
    return all(_same_value(value, answer_values[-1], algebra) for value in response_values)


def _share_name(response_names: list[str], answer_names: list[str]) -> bool:
    """Return whether both sides have a name in common; x is x_1, but x_1 is not x_2."""
    pairs = [(_reading(a), _reading(b)) for a in response_names for b in answer_names]
    return any(a == b or a == b.partition("_")[0] or b == a.partition("_")[0] for a, b in pairs)


def _reading(name: str) -> str:
    """Return one name for a segment or an angle read from either end: AB for BA."""
    return min(name, name[::-1]) if name.isupper() else name


def _same_value(response: str, answer: str, algebra: bool) -> bool:
    """Compare two values without names, and their units."""
    if split_list(response)[0] and split_list(answer)[0]:
        return _same_list(response, answer, algebra)
    response_value, response_unit = split_unit(response)
    answer_value, answer_unit = split_unit(answer)
    if not response_value or not answer_value:
        return False
    # A unit may be left out on either side, except that a per cent sign may not be added.
    if response_unit and response_unit != answer_unit and (answer_unit or response_unit == "%"):
        return False
    quick_verdict = _same_at_sight(response_value, answer_value)
    if quick_verdict is not None:
        return quick_verdict
    if _NO_FORMULA.search(response_value) or _NO_FORMULA.search(answer_value):
        return False
    return _same_formula(response_value, answer_value, algebra)


def _same_formula(response: str, answer: str, algebra: bool) -> bool:
    """Compare formulas by math-verify's grammar of LaTeX.

    `sympify` is never called: it would run the text as Python.
    """
    if not algebra:
        raise NeedsAlgebra
    from math_verify.grader import sympy_numeric_eq, sympy_symbolic_eq
    from sympy import Expr
    from sympy.core.relational import Relational

    response_formula, answer_formula = _formula(response), _formula(answer)
    if isinstance(response_formula, Relational) and isinstance(answer_formula, Relational):
        return _same_relation(response_formula, answer_formula)
    if not isinstance(response_formula, Expr) or not isinstance(answer_formula, Expr):
        return False
    if _letters(response) != _letters(answer) and _letters(response.lower()) == _letters(
        answer.lower()
    ):
        return False  # the grammar ignores case: it takes 2X for 2x
    constants = [not formula.free_symbols for formula in (response_formula, answer_formula)]
    if not any(constants):
        return sympy_numeric_eq(answer_formula, response_formula, 6, 15) or sympy_symbolic_eq(
            answer_formula, response_formula
        )
    if not all(constants):
        return False
    a, b = _evaluate(response, response_formula), _evaluate(answer, answer_formula)
    if a is None or b is None:
        return False
    return abs(a.value - b.value) <= _TOLERANCE * max(abs(a.value), abs(b.value)) or same_number(
        a, b
    )


def _letters(text: str) -> set[str]:
    """Return the letters of a formula's variables."""
    return set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))


def _formula(text: str):
    """Return LaTeX as a sympy formula, None if it can't be parsed.

    math-verify's reading of units is off: it would take t, d or g after a number for a unit, and 6t
    for 6.
    """
    from math_verify import LatexExtractionConfig, parse
    from math_verify.parser import NormalizationConfig

    config = LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            units=False, malformed_operators=True, nits=True, boxed="none"
        ),  # pyright: ignore[reportArgumentType]
    )
    # No timeout: math-verify's is an alarm signal, which a thread can't have.
    formulas = parse(
        f"${text}$",
        [config],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return formulas[0] if formulas else None


def _same_relation(response_relation, answer_relation) -> bool:
    """Return whether two equations or inequalities are multiples of each other.

    2x = 2y is y = x, and -x < 1 is x > -1.

    `math_verify.verify` compares solutions instead. So it takes x² = -1 for x² = -2, which have none.
    """
    from sympy import Eq, Ge, Gt, Le, Lt, simplify

    # Every relation becomes `difference = 0`, `difference > 0` or `difference >= 0`.
    differences, kinds = [], []
    for relation in (response_relation, answer_relation):
        difference = relation.lhs - relation.rhs
        is_less = isinstance(relation, Lt | Le)
        differences.append(-difference if is_less else difference)
        kinds.append(
            Eq if isinstance(relation, Eq) else Gt if isinstance(relation, Lt | Gt) else Ge
        )
        if not isinstance(relation, Eq | Ge | Gt | Le | Lt) or not difference.free_symbols:
            return False
    factor = simplify(differences[0] / differences[1])
    if kinds[0] is not kinds[1] or not factor.is_number or not factor.is_finite:
        return False
    return bool(factor.is_nonzero) if kinds[0] is Eq else bool(factor.is_positive)


def _evaluate(text: str, formula) -> Number | None:
    """Return the number that a formula evaluates to; None unless it is finite and real."""
    if not _SCIENTIFIC.search(text) and (number := parse_number(text)) is not None:
        return number
    value = formula.evalf(30)
    return Number(Fraction(str(value))) if value.is_Float or value.is_Rational else None


def parse_number(text: str) -> Number | None:
    r"""Return the number of a text; None if it is none.

    Numbers are integers, decimals (also `0.\overline{3}`, 1e-05, 2 \times 10^3), fractions and
    mixed numbers.
    """
    text = re.sub("^([+-]) +", r"\1", text)
    if match := _DECIMAL.fullmatch(text):
        sign, integer_digits, decimals, cycle = match[1], match[2], match[3] or "", match[4]
        if not integer_digits + decimals + (cycle or ""):
            return None
        exponent = int(match[5] or match[6] or 0)
        is_scientific = match[5] is not None or match[6] is not None
        value = Fraction(int("0" + integer_digits + decimals), 10 ** len(decimals))
        unit = Fraction(10) ** (exponent - len(decimals)) if decimals and not cycle else None
        if cycle:
            value += Fraction(int(cycle), 10 ** len(decimals) * (10 ** len(cycle) - 1))
        digits = len((integer_digits + decimals).lstrip("0"))
        value *= Fraction(10) ** exponent * (-1 if sign == "-" else 1)
        return Number(value, None if is_scientific and digits < 3 else unit, digits)
    if match := _POWER_OF_TEN.fullmatch(text):
        return Number(Fraction(10) ** int(match[2]) * (-1 if match[1] == "-" else 1))
    if match := _FRACTION.fullmatch(text):
        sign, *parts = match.groups()  # the parts of `3 1/2`, then those of `3\frac{1}{2}`
        integer, numerator, denominator = parts[:3] if parts[2] else parts[3:]
        if int(denominator) == 0 or (integer and Fraction(int(numerator), int(denominator)) < 0):
            return None
        value = int(integer or 0) + Fraction(int(numerator), int(denominator))
        return Number(-value if sign == "-" else value)
    return None


def same_number(response: Number, answer: Number) -> bool:
    """Return whether two numbers are the same, with the roundings in the module's docstring."""
    error = abs(response.value - answer.value)
    if error == 0:
        return True
    if answer.unit is not None:
        return answer.digits >= 2 and 2 * error <= answer.unit
    is_integer = answer.value.denominator == 1
    return (
        response.unit is not None
        and response.digits >= 3
        and not is_integer
        and 2 * error <= response.unit
    )
