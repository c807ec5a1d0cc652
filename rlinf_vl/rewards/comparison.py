r"""When two answers, normalised by `rlinf_vl.rewards.latex`, are the same.

Equal strings are; equal numbers are. Dressing is ignored: the name of the quantity (`AB = 12`, `m\angle A = 30`), units and
degrees, unless both sides have one and they differ. A per cent sign may be left out like a unit but not added: 25 % is
neither 25 nor 0.25, nor is 0.25 25 %. Of a chain of equalities every link must be the answer. Lists without brackets and
sets match in any order, tuples and intervals in theirs; an inequality is its interval.

Integers, fractions, repeating decimals and closed forms are exact: 7 is never right for 7.2, 500 for 5, nor 1999.5 for 1999.
A decimal may be a rounding:

- A *reference* decimal of two or more significant digits stands for everything within half a unit of its last place, both
  ends included: 8.66 for 5√3, 8.6603 and 8.655, not for 8.7. One of a single digit (0.6) stands for itself.
- A *response's* decimal is right for an exact answer that is no integer if it is that answer rounded to the digits given and
  gives at least three significant ones: 17.3 for 10√3; 8.7 for 5√3 is wrong.
- The last place of 6.02e23 is that of its 2: of three or more digits it is a decimal; with fewer, or none behind the point,
  it stands for itself.

Formulas are read, and those with variables compared, by math-verify; the rest is compared here, since `math_verify.verify`
0.9.0 pays 56 of the 361 wrong boxes of `tests/unit/rewards/corpus/math.jsonl` (5 km for 5 m, 6t for 6, (2,3) for {2,3}).
"""

import logging
import re
from dataclasses import dataclass
from fractions import Fraction

from rlinf_vl.rewards.latex import depths, split_equation, split_inequality, split_list, split_matrix, split_union
from rlinf_vl.rewards.units import split_unit

MAX_ELEMENTS = 8
"""Longest list that is compared."""
MAX_CELLS = 16
"""Largest matrix that is compared, in cells."""
MAX_NESTING = 12
"""Deepest brackets that are compared: the time of math-verify's parser grows steeply with them."""
_EQUAL = Fraction(1, 10**12)
"""Relative difference below which two closed forms, evaluated to 30 digits, are the same number."""

_DECIMAL = re.compile(
    r"([+-]?)([0-9]*)(?:\.([0-9]*)(?:\\overline ?\{([0-9]+)\})?)?"
    r"(?:[eE]([+-]?[0-9]{1,3})| ?(?:\\times|\\cdot|\*|x) ?10 ?(?:\^|\*\*) ?\{? ?([+-]?[0-9]{1,3}) ?\}?)?"
)
_POWER_OF_TEN = re.compile(r"([+-]?)10 ?\^ ?\{? ?([+-]?[0-9]{1,3}) ?\}?")
_SCIENTIFIC = re.compile("[0-9.][eE]")
_FRACTION = re.compile(
    r"([+-]?) ?(?:(?:([0-9]+) )?([0-9]+) ?/ ?([0-9]+)|([0-9]*) ?\\frac ?\{ ?([+-]?[0-9]+) ?\} ?\{ ?([+-]?[0-9]+) ?\})"
)

_OPTION = re.compile(r"\(?(?P<letter>[A-J])(?:\)[.:]?|[.:])?(?:(?<=[).:]) +(?P<text>.+))?")
_POINT = re.compile(r"([A-Z])'? ?([(].*[)])")
_CLOCK = re.compile(r"[0-9]{1,2} ?: ?[0-5][0-9]")
#: A word, signs only, two numbers side by side, or characters that no formula has.
_HOPELESS = re.compile(r"^[A-Za-z ]{2,}$|^[^A-Za-z0-9]*$|[0-9] +[0-9]|[0-9] *_|__|'''|[^\x00-\x7f]|[$&]")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit; the worker has one


class NeedsAlgebra(Exception):
    """The answers are formulas, and algebra was not allowed."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written.

    Attributes:
        unit: what one more in its last place is worth, if it may be a rounding; None: it stands for itself.
        digits: significant digits.
    """

    value: Fraction
    unit: Fraction | None = None
    digits: int = 0


def same(response: str, answer: str, *, algebra: bool) -> bool:
    """Whether two answers are the same. Quick without algebra, of any time and memory with it.

    Raises:
        NeedsAlgebra: they are formulas, and `algebra` is False.
    """
    if not response or not answer:
        return False
    if (seen := _same_at_sight(response, answer)) is not None:
        return seen
    if max(depths(response) + depths(answer)) > MAX_NESTING:
        return False
    for compare, needed in _COMPARISONS:
        if needed is None or needed.search(response) or needed.search(answer):
            verdict = compare(response, answer, algebra)
            if verdict is not None:
                return verdict
    return _same_list(response, answer, algebra)


def _same_at_sight(response: str, answer: str) -> bool | None:
    """Whether two equal strings or two numbers are the same; None for others, and where 2e-1 may be a formula."""
    if _key(response) == _key(answer):
        return True
    given, wanted = parse_number(response), parse_number(answer)
    if given is None or wanted is None:
        return None
    return same_number(given, wanted) or (None if _SCIENTIFIC.search(f"{response} {answer}") else False)


def _key(text: str) -> str:
    """Without spaces, but for those that separate two numbers; without case if it is made of words."""
    key = re.sub(r"(?<![0-9]) +| +(?![0-9])", "", text) if " " in text else text
    return key.casefold() if key.isalpha() else key


def _same_option(response: str, answer: str, algebra: bool) -> bool | None:
    """Compare where the reference is the letter of an option, `C` or `(C)`, or an option with its text, `C. 12 cm`."""
    wanted = _OPTION.fullmatch(answer)
    if wanted is None or not (wanted["text"] or len(answer) <= 4):
        return None
    given = _OPTION.fullmatch(response)
    if given is None:
        return _same_list(response, wanted["text"], algebra) if wanted["text"] else None
    if given["letter"] != wanted["letter"]:
        return False
    if given["text"] and wanted["text"]:
        return _same_list(given["text"], wanted["text"], algebra)
    return True


def _same_ratio(response: str, answer: str, algebra: bool) -> bool | None:
    """Compare where either is a ratio, `3:4`. It may be a time of day, so 1:15 is not 3:45, and no fraction is a ratio of it."""
    wanted = [parse_number(term.strip()) for term in answer.split(":")]
    given = [parse_number(term.strip()) for term in response.split(":")]
    if None in wanted or None in given or len(wanted) < 2:
        return False if len(wanted) > 1 or len(given) > 1 else None
    is_clock = _CLOCK.fullmatch(answer) is not None
    a = [term.value for term in given if term is not None]
    b = [term.value for term in wanted if term is not None]
    if len(a) == 1 and len(b) == 2:
        return not is_clock and b[1] != 0 and "/" in response.replace("\\frac", "/") and a[0] * b[1] == b[0]
    if len(a) != len(b):
        return False
    if is_clock or not all(a + b):
        return a == b
    return all(x * b[0] == y * a[0] for x, y in zip(a, b, strict=True))


def _same_matrix(response: str, answer: str, algebra: bool) -> bool | None:
    given, wanted = split_matrix(_value(response)), split_matrix(_value(answer))
    if given is None or wanted is None:
        return None if given is wanted else False
    if [len(row) for row in given] != [len(row) for row in wanted] or sum(map(len, wanted)) > MAX_CELLS:
        return False
    return all(
        same(cell, wanted_cell, algebra=algebra)
        for row, wanted_row in zip(given, wanted, strict=True)
        for cell, wanted_cell in zip(row, wanted_row, strict=True)
    )


def _value(text: str) -> str:
    """An equation's right side behind one letter, `A = …`, where that is a matrix."""
    return re.sub(r"^[A-Za-z] ?= ?(?=\\matrix)", "", text)


def _same_sets(response: str, answer: str, algebra: bool) -> bool | None:
    """Compare where either is an inequality or a union of intervals; several inequalities are a union."""
    given, wanted = _pieces(response), _pieces(answer)
    if given is None and wanted is None:
        return None
    if given is None or wanted is None:  # an interval for the inequality, or the reverse
        bare = response if given is None else answer
        pieces = given or wanted
        brackets, ends = split_list(bare)
        if pieces is None or len(pieces) != 1 or len(ends) != 2 or not brackets:
            return None if "\\cup" not in response + answer else False
        if wanted is None and brackets == "()" and "\\infty" not in bare:
            return False  # the reference may be a point
        given, wanted = given or [("", bare)], wanted or [("", bare)]
    if len(given) != len(wanted) or len(wanted) > MAX_ELEMENTS:
        return False
    if len({name for name, _ in given + wanted} - {""}) > 1:
        return None if len(wanted) == 1 else False
    for _, piece in wanted:
        index = next((i for i, (_, other) in enumerate(given) if _same_list(other, piece, algebra)), None)
        if index is None:
            return False
        given = given[:index] + given[index + 1 :]
    return True


def _pieces(text: str) -> list[tuple[str, str]] | None:
    """(variable or "", interval) of each set of a union or of inequalities joined by "or"; None for anything else."""
    sets = split_union(text)
    if len(sets) > 1:
        return [("", piece) for piece in sets]
    pieces = [split_inequality(part) for part in split_list(text)[1]]
    return None if None in pieces else [piece for piece in pieces if piece is not None]


#: Comparisons that say None where they have no say, each with what it needs to have one.
_COMPARISONS = (
    (_same_option, None),
    (_same_ratio, re.compile(":")),
    (_same_matrix, re.compile(r"\\matrix")),
    (_same_sets, re.compile(r"[<>]|\\[lg]e(?![a-zA-Z])|\\cup")),
)


def _same_list(response: str, answer: str, algebra: bool) -> bool:
    (brackets, given), (wanted_brackets, wanted) = split_list(response), split_list(answer)
    if brackets != wanted_brackets:
        (point, given_tuple), (wanted_point, wanted_tuple) = _split_point(response), _split_point(answer)
        if not (point or wanted_point) or (point and wanted_point and point != wanted_point):
            return _same_equation(response, answer, algebra) if "=" in response + answer else False
        return _same_list(given_tuple, wanted_tuple, algebra)
    if len(given) != len(wanted) or len(given) > MAX_ELEMENTS:
        return False
    if len(given) == 1:
        (point, given_tuple), (wanted_point, wanted_tuple) = _split_point(response), _split_point(answer)
        if point and wanted_point:
            return point == wanted_point and _same_list(given_tuple, wanted_tuple, algebra)
        return _same_equation(response, answer, algebra)
    for wanted_element in wanted:
        candidates = given[:1] if brackets else given
        match = next((element for element in candidates if same(element, wanted_element, algebra=algebra)), None)
        if match is None:
            return False
        given.remove(match)
    return True


def _split_point(text: str) -> tuple[str, str]:
    """(name, coordinates) of a point, `P(2,3)`; ("", text) for anything else."""
    match = _POINT.fullmatch(text)
    return (match[1], match[2]) if match and len(split_list(match[2])[1]) > 1 else ("", text)


def _same_equation(response: str, answer: str, algebra: bool) -> bool:
    given_names, given = split_equation(response)
    wanted_names, wanted = split_equation(answer)
    if given_names and wanted_names and not given and not wanted:  # x = y, from either end
        return {_reading(name) for name in given_names} == {_reading(name) for name in wanted_names}
    if not given and not wanted_names and re.fullmatch("[A-Z]", given_names[0]):
        return False  # A = B says of two options, or of two lengths, that they are the same
    given, wanted = given or given_names[-1:], wanted or wanted_names[-1:]  # x = A
    is_equation = len(wanted) > 1 and not wanted_names
    if is_equation or (wanted_names and len(given) > 1 and not given_names):
        return len(given) + len(given_names) > 1 and _same_formula(response, answer, algebra)
    if given_names and wanted_names and not _share_name(given_names, wanted_names):
        is_line = all(re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", values[-1]) for values in (given, wanted))
        return is_line and len(given) == len(wanted) == 1 and _same_formula(response, answer, algebra)
    return all(_same_value(value, wanted[-1], algebra) for value in given)


def _share_name(given_names: list[str], wanted_names: list[str]) -> bool:
    """Whether a name of either side is one of the other's; x is x_1, but x_1 is not x_2."""
    pairs = [(_reading(given), _reading(wanted)) for given in given_names for wanted in wanted_names]
    return any(a == b or a == b.partition("_")[0] or b == a.partition("_")[0] for a, b in pairs)


def _reading(name: str) -> str:
    """One name for a segment or an angle read from either end: AB for BA."""
    return min(name, name[::-1]) if name.isupper() else name


def _same_value(response: str, answer: str, algebra: bool) -> bool:
    if split_list(response)[0] and split_list(answer)[0]:
        return _same_list(response, answer, algebra)
    given, given_unit = split_unit(response)
    wanted, wanted_unit = split_unit(answer)
    if not given or not wanted:
        return False
    if given_unit and given_unit != wanted_unit and (wanted_unit or given_unit == "%"):
        return False
    if (seen := _same_at_sight(given, wanted)) is not None:
        return seen
    return not _HOPELESS.search(given) and not _HOPELESS.search(wanted) and _same_formula(given, wanted, algebra)


def _same_formula(response: str, answer: str, algebra: bool) -> bool:
    """By math-verify's grammar of LaTeX; never by `sympify`, which would run the text as Python."""
    if not algebra:
        raise NeedsAlgebra
    from math_verify.grader import sympy_numeric_eq, sympy_symbolic_eq
    from sympy import Expr
    from sympy.core.relational import Relational

    given, wanted = _formula(response), _formula(answer)
    if isinstance(given, Relational) and isinstance(wanted, Relational):
        return _same_relation(given, wanted)
    if not isinstance(given, Expr) or not isinstance(wanted, Expr):
        return False
    if _letters(response) != _letters(answer) and _letters(response.lower()) == _letters(answer.lower()):
        return False  # the grammar knows no case: 2X is 2x
    constants = [not formula.free_symbols for formula in (given, wanted)]
    if not any(constants):
        return sympy_numeric_eq(wanted, given, 6, 15) or sympy_symbolic_eq(wanted, given)
    a, b = (_evaluate(response, given), _evaluate(answer, wanted)) if all(constants) else (None, None)
    if a is None or b is None:
        return False
    return abs(a.value - b.value) <= _EQUAL * max(abs(a.value), abs(b.value)) or same_number(a, b)


def _letters(text: str) -> set[str]:
    """The variables of a formula."""
    return set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))


def _formula(text: str):
    """Read LaTeX. Units are left as they are: math-verify would take t, d or g behind a number for one, and 6t for 6."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify.parser import NormalizationConfig

    config = LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none"),  # pyright: ignore[reportArgumentType]
    )
    formulas = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: no alarm, which a thread can't have
    return formulas[0] if formulas else None


def _same_relation(given, wanted) -> bool:
    """Whether two equations or inequalities are each other's multiples: 2x = 2y and y = x, -x < 1 and x > -1.

    `math_verify.verify` compares their solutions, and finds x² = -1 and x² = -2, which have none, the same.
    """
    from sympy import Eq, Ge, Gt, Le, Lt, simplify

    differences, kinds = [], []
    for relation in (given, wanted):
        difference = relation.lhs - relation.rhs
        is_less = isinstance(relation, Lt | Le)
        differences.append(-difference if is_less else difference)
        kinds.append(Eq if isinstance(relation, Eq) else Gt if isinstance(relation, Lt | Gt) else Ge)
        if not isinstance(relation, Eq | Ge | Gt | Le | Lt) or not difference.free_symbols:
            return False
    factor = simplify(differences[0] / differences[1])
    if kinds[0] is not kinds[1] or not factor.is_number or not factor.is_finite:
        return False
    return bool(factor.is_nonzero) if kinds[0] is Eq else bool(factor.is_positive)


def _evaluate(text: str, formula) -> Number | None:
    """The number that a formula is; None unless it is finite and real."""
    if not _SCIENTIFIC.search(text) and (number := parse_number(text)) is not None:
        return number
    value = formula.evalf(30)
    return Number(Fraction(str(value))) if value.is_Float or value.is_Rational else None


def parse_number(text: str) -> Number | None:
    r"""An integer, decimal (also `0.\overline{3}`, 1e-05, 2 \times 10^3), fraction or mixed number; None for anything else."""
    text = re.sub("^([+-]) +", r"\1", text)
    if match := _DECIMAL.fullmatch(text):
        sign, whole, behind, cycle = match[1], match[2], match[3] or "", match[4]
        if not whole + behind + (cycle or ""):
            return None
        exponent = int(match[5] or match[6] or 0)
        is_scientific = match[5] is not None or match[6] is not None
        value = Fraction(int("0" + whole + behind), 10 ** len(behind))
        unit = Fraction(10) ** (exponent - len(behind)) if behind and not cycle else None
        if cycle:
            value += Fraction(int(cycle), 10 ** len(behind) * (10 ** len(cycle) - 1))
        digits = len((whole + behind).lstrip("0"))
        value *= Fraction(10) ** exponent * (-1 if sign == "-" else 1)
        return Number(value, None if is_scientific and digits < 3 else unit, digits)
    if match := _POWER_OF_TEN.fullmatch(text):
        return Number(Fraction(10) ** int(match[2]) * (-1 if match[1] == "-" else 1))
    if match := _FRACTION.fullmatch(text):
        sign, *parts = match.groups()
        whole, over, under = parts[:3] if parts[2] else parts[3:]
        if int(under) == 0 or (whole and Fraction(int(over), int(under)) < 0):
            return None
        value = int(whole or 0) + Fraction(int(over), int(under))
        return Number(-value if sign == "-" else value)
    return None


def same_number(response: Number, answer: Number) -> bool:
    """Whether the response's number is the answer's, roundings as above."""
    error = abs(response.value - answer.value)
    if error == 0:
        return True
    if answer.unit is not None:
        return answer.digits >= 2 and 2 * error <= answer.unit
    is_integer = answer.value.denominator == 1
    return response.unit is not None and response.digits >= 3 and not is_integer and 2 * error <= response.unit
