r"""Plain numbers as people write them, and when a decimal is close enough to be the answer.

Integers, fractions and repeating decimals are exact: 7 is never right for 7.2, 500 for 5, nor 1999.5 for 1999. A decimal may
be a rounding:

- A *response's* decimal is right if it is the answer rounded to the digits given and gives at least three significant ones
  (17.3 for 10√3; 8.7 for 5√3 is wrong), or, where the answer is not exact, within 0.1 % of its value.
- A *reference* decimal stands for what rounds to it if it has three significant digits (8.66 for 5√3). With two of them
  and two places it does so only for an exact response (0.38 for 5/13); 0.6 stands for itself.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_PLAIN = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?")
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")
_FRACTION = re.compile(r"([+-]?) ?([0-9]*) ?\\frac ?\{ ?([+-]?[0-9]+) ?\} ?\{ ?([+-]?[0-9]+) ?\}")
_SLASH = re.compile(r"([+-]?)(?:([0-9]+) )?([0-9]+) ?/ ?([0-9]+)")

_SCIENTIFIC = re.compile(r"([+-]?[0-9]+)(?:\.([0-9]*))?[eE]([+-]?[0-9]{1,3})")


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was written out.

    `places` counts the digits behind the decimal point, 0 without one; `significant` counts its significant digits; `exact`:
    it stands for nothing but itself.
    """

    value: Fraction
    places: int = 0
    significant: int = 0
    exact: bool = True


def parse_number(text: str) -> Number | None:
    r"""An integer, decimal (also `0.\overline{3}`, `1,440`), fraction or mixed number; None for anything else."""
    text = re.sub("^([+-]) +", r"\1", text.strip())
    if _GROUPED.fullmatch(text):
        text = re.sub("[, ]", "", text)
    if match := _PLAIN.fullmatch(text):
        sign, whole, behind = match[1], match[2], match[3] or ""
        if not whole + behind:
            return None
        value = Fraction(int(whole + behind), 10 ** len(behind))
        return Number(-value if sign == "-" else value, len(behind), len((whole + behind).lstrip("0")), not behind)
    if match := _REPEATING.fullmatch(text):
        sign, whole, behind, cycle = match.groups()
        tail = Fraction(int(cycle), 10 ** len(cycle) - 1)
        value = (int("0" + whole + behind) + tail) / 10 ** len(behind)
        return Number(-value if sign == "-" else value)
    if match := _FRACTION.fullmatch(text) or _SLASH.fullmatch(text):
        sign, whole, over, under = match.groups()
        if int(under) == 0:
            return None
        value = Fraction(int(over), int(under))
        if whole:
            if value < 0:
                return None
            value += int(whole)
        return Number(-value if sign == "-" else value)
    return None


def parse_scientific(text: str) -> Number | None:
    """A number as programs write it (1e-05, 2e+16, 1.5E3); None for anything else. To a reader of formulas, 2e-1 may be 2e - 1."""
    if (match := _SCIENTIFIC.fullmatch(text)) is None:
        return None
    behind = match[2] or ""
    digits, places = match[1] + behind, len(behind) - int(match[3])
    return Number(int(digits) * Fraction(10) ** -places, max(0, places), len(digits.lstrip("+-0")), places <= 0)


def same_number(response: Number, answer: Number) -> bool:
    """Whether the response's number is the answer's, roundings as told above."""
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
