r"""When two answers, normalised by `rlinf_vl.rewards.latex`, are the same.

Equal strings are; equal numbers are. Dressing is ignored: the name of the quantity (`AB = 12`, `m\angle A = 30`), units and
degrees, unless both sides have one and they differ. A per cent sign may be left out like a unit but not added: 25 % is
neither 25 nor 0.25, nor is 0.25 25 %. Of a chain of equalities every link must be the answer. Lists without brackets and
sets match in any order, tuples and intervals in theirs. Everything else is left to math-verify.

Integers, fractions and repeating decimals are exact: 7 is never right for 7.2, 500 for 5, nor 1999.5 for 1999. A decimal may
be a rounding:

- A *response's* decimal is right if it is the answer rounded to the digits given and gives at least three significant ones
  (17.3 for 10√3; 8.7 for 5√3 is wrong), or, where the answer is not exact, within 0.1 % of its value.
- A *reference* decimal stands for what rounds to it if it has three significant digits (8.66 for 5√3). With two of them
  and two places it does so only for an exact response (0.38 for 5/13); 0.6 stands for itself.
"""

import logging
import re
from dataclasses import dataclass
from fractions import Fraction

from rlinf_vl.rewards.latex import depths, split_equation, split_list, split_unit

MAX_ELEMENTS = 8
"""Longest list that is compared."""
MAX_NESTING = 12
"""Deepest brackets that are compared: the time of math-verify's parser grows steeply with them."""
_EQUAL = Fraction(1, 10**12)
"""Relative difference below which two closed forms, evaluated to 30 digits, are the same number."""

_DECIMAL = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*)(?:\\overline\{([0-9]+)\})?)?(?:[eE]([+-]?[0-9]{1,3}))?")
_SCIENTIFIC = re.compile("[0-9.][eE]")
_FRACTION = re.compile(
    r"([+-]?) ?(?:(?:([0-9]+) )?([0-9]+) ?/ ?([0-9]+)|([0-9]*) ?\\frac ?\{ ?([+-]?[0-9]+) ?\} ?\{ ?([+-]?[0-9]+) ?\})"
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit; the worker has one


class NeedsAlgebra(Exception):
    """The answers are formulas, and algebra was not allowed."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: digits behind the decimal point, significant digits, and whether it stands for itself only."""

    value: Fraction
    places: int = 0
    significant: int = 0
    exact: bool = True


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
    (brackets, given), (wanted_brackets, wanted) = split_list(response), split_list(answer)
    if brackets != wanted_brackets or len(given) != len(wanted) or len(given) > MAX_ELEMENTS:
        return False
    if len(given) == 1:
        return _same_equation(response, answer, algebra)
    for w in wanted:
        match = next((g for g in (given[:1] if brackets else given) if same(g, w, algebra=algebra)), None)
        if match is None:
            return False
        given.remove(match)
    return True


def _same_at_sight(response: str, answer: str) -> bool | None:
    """Whether two equal strings or two numbers are the same; None for others, and where 2e-1 may be a formula."""
    if _key(response) == _key(answer):
        return True
    given, wanted = parse_number(response), parse_number(answer)
    if given is None or wanted is None:
        return None
    return same_number(given, wanted) or (None if _SCIENTIFIC.search(f"{response} {answer}") else False)


def _key(text: str) -> str:
    """Without case or spaces, but for those that separate two numbers."""
    return re.sub(r"(?<![0-9]) +| +(?![0-9])", "", text).casefold()


def _same_equation(response: str, answer: str, algebra: bool) -> bool:
    given_names, given = split_equation(response)
    wanted_names, wanted = split_equation(answer)
    is_equation = len(wanted) > 1 and not wanted_names
    if is_equation or (wanted_names and len(given) > 1 and not given_names):
        return len(given) + len(given_names) > 1 and _same_formula(response, answer, algebra)
    readings = {*given_names, *(name[::-1] for name in given_names if name.isupper())}  # a segment from either end
    if given_names and wanted_names and readings.isdisjoint(wanted_names):
        return False
    return all(_same_value(value, wanted[-1], algebra) for value in given)


def _same_value(response: str, answer: str, algebra: bool) -> bool:
    given, given_unit = split_unit(response)
    wanted, wanted_unit = split_unit(answer)
    if not given or not wanted:
        return False
    if given_unit and given_unit != wanted_unit and (wanted_unit or given_unit == "%"):
        return False
    if (seen := _same_at_sight(given, wanted)) is not None:
        return seen
    # a word, signs only, two numbers side by side, or characters that no formula has
    hopeless = r"^[A-Za-z ]{2,}$|^[^A-Za-z0-9]*$|[0-9] +[0-9]|[0-9] *_|__|[^\x00-\x7f]"
    return not re.search(hopeless, given) and not re.search(hopeless, wanted) and _same_formula(given, wanted, algebra)


def _same_formula(response: str, answer: str, algebra: bool) -> bool:
    """By math-verify's grammar of LaTeX; never by `sympify`, which would run the text as Python."""
    if not algebra:
        raise NeedsAlgebra
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Expr

    def read(text: str):
        found = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: no alarm, which a thread can't have
        return found[0] if found else None

    given, wanted = read(response), read(answer)
    if given is None or wanted is None:
        return False
    constants = [isinstance(formula, Expr) and not formula.free_symbols for formula in (given, wanted)]
    if not any(constants):
        return bool(verify(wanted, given, timeout_seconds=None))
    a, b = (_evaluate(response, given), _evaluate(answer, wanted)) if all(constants) else (None, None)
    if a is None or b is None:
        return False
    return abs(a.value - b.value) <= _EQUAL * max(abs(a.value), abs(b.value)) or same_number(a, b)


def _evaluate(text: str, formula) -> Number | None:
    """The number that a formula is; None unless it is finite and real."""
    if not _SCIENTIFIC.search(text) and (number := parse_number(text)) is not None:
        return number
    value = formula.evalf(30)
    return (
        Number(Fraction(str(value)), exact=formula.is_rational is True) if value.is_Float or value.is_Rational else None
    )


def parse_number(text: str) -> Number | None:
    r"""An integer, decimal (also `0.\overline{3}`, 1e-05), fraction or mixed number; None for anything else."""
    text = re.sub("^([+-]) +", r"\1", text)
    if match := _DECIMAL.fullmatch(text):
        sign, whole, behind, cycle, exponent = match[1], match[2], match[3] or "", match[4], int(match[5] or 0)
        if not whole + behind + (cycle or ""):
            return None
        value = Fraction(int("0" + whole + behind), 10 ** len(behind))
        if cycle:
            value += Fraction(int(cycle), 10 ** len(behind) * (10 ** len(cycle) - 1))
            behind = ""
        places, digits = max(0, len(behind) - exponent), (whole + behind).lstrip("0")
        value *= Fraction(10) ** exponent * (-1 if sign == "-" else 1)
        return Number(value, places, len(digits), exact=places == 0)
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
    if response.places:
        if not answer.exact and error * 1000 <= abs(answer.value):
            return True
        if response.significant >= 3 and 2 * error * 10**response.places <= 1:
            return True
    rounded = answer.significant >= 3 or (answer.significant == 2 <= answer.places and response.places == 0)
    return rounded and answer.places > 0 and 2 * error * 10**answer.places <= 1
