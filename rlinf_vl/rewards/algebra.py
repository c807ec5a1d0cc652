"""Whether two formulas are the same, by math-verify and sympy: may take any time and memory, so it runs in a worker."""

import logging
from fractions import Fraction

from rlinf_vl.rewards.numbers import Number, parse_number, same_number

_EQUAL = Fraction(1, 10**12)
"""Relative difference below which two closed forms, evaluated to 30 digits, are the same number."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of limits that are ours to set


def algebra(response: str, answer: str) -> bool:
    """Whether two formulas in LaTeX are the same; numbers are compared by value, roundings allowed.

    The text goes through math-verify's ANTLR grammar of LaTeX only, never through `sympify`, which would run it as Python.
    """
    from math_verify import verify
    from sympy import Expr

    given, wanted = _parse(response), _parse(answer)
    if given is None or wanted is None:
        return False
    constant = [isinstance(x, Expr) and not x.free_symbols for x in (given, wanted)]
    if not any(constant):
        return bool(verify(wanted, given, timeout_seconds=None))
    if not all(constant):
        return False
    a, b = _value(response, given), _value(answer, wanted)
    if a is None or b is None:
        return False
    return abs(a.value - b.value) <= _EQUAL * max(abs(a.value), abs(b.value)) or same_number(a, b)


def _parse(text: str):
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: no alarm, which a thread can't have
    return found[0] if found else None


def _value(text: str, formula) -> Number | None:
    """The number that a formula is; None if it isn't a finite real one."""
    if (number := parse_number(text)) is not None:
        return number
    value = formula.evalf(30)
    exact = formula.is_rational is True
    return Number(Fraction(str(value)), exact=exact) if value.is_Float or value.is_Rational else None
