r"""When two normalised answers are the same.

Equal strings are; so are equal numbers, roundings as in `rlinf_vl.rewards.numbers`. Dressing is taken off: the name of
the quantity (`AB = 12`, `m\angle A = 30`), units and degrees, unless both sides have one and they differ. A per cent
sign may be left out like a unit but not added: 25 % is neither 25 nor 0.25, nor is 0.25 25 %. Of a chain of equalities
every link must be the answer. Lists without brackets and sets match in any order, tuples and intervals in theirs.
Whatever is left is for algebra.
"""

import re
from collections.abc import Callable

from rlinf_vl.rewards.latex import depths, key, split_equation, split_list, split_unit
from rlinf_vl.rewards.numbers import parse_number, parse_scientific, same_number

Algebra = Callable[[str, str], bool]
"""Whether two formulas, (response, answer), are the same."""

MAX_ELEMENTS = 8
"""Longest list that is compared."""

MAX_NESTING = 12
"""Deepest brackets that are looked into: the time of algebra's parser grows steeply with them."""


def same(response: str, answer: str, algebra: Algebra) -> bool:
    """Whether two answers, as `rlinf_vl.rewards.latex.normalise` leaves them, are the same; what `algebra` raises passes.

    Without algebra it is quick: texts of a thousand characters take milliseconds.
    """
    if not response or not answer:
        return False
    if (seen := _same_at_sight(response, answer)) is not None:
        return seen
    if max(depths(response) + depths(answer)) > MAX_NESTING:
        return False
    if _one_value(response) and _one_value(answer):
        return _same_equation(response, answer, algebra)
    given, wanted = split_list(response), split_list(answer)
    if given is None or wanted is None or given[0] != wanted[0]:
        return False
    return _same_elements(given[1], wanted[1], algebra, ordered=bool(given[0]))


def _same_at_sight(response: str, answer: str) -> bool | None:
    """Whether two equal strings or two plain numbers are the same; None for others, and where 2e-1 is no 0.2."""
    if key(response) == key(answer):
        return True
    given, wanted = parse_number(response), parse_number(answer)
    if given and wanted:
        return same_number(given, wanted)
    given, wanted = given or parse_scientific(response), wanted or parse_scientific(answer)
    return True if given and wanted and same_number(given, wanted) else None


def _one_value(text: str) -> bool:
    return split_list(text) is None or parse_number(split_unit(split_equation(text)[1][-1])[0]) is not None


def _same_elements(given: list[str], wanted: list[str], algebra: Algebra, *, ordered: bool) -> bool:
    if len(given) != len(wanted) or len(given) > MAX_ELEMENTS:
        return False
    if ordered:
        return all(same(g, w, algebra) for g, w in zip(given, wanted, strict=True))
    left = list(given)
    for w in wanted:
        match = next((i for i, g in enumerate(left) if same(g, w, algebra)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _same_equation(response: str, answer: str, algebra: Algebra) -> bool:
    given_names, given = split_equation(response)
    wanted_names, wanted = split_equation(answer)
    is_equation = len(wanted) > 1 and not wanted_names
    if is_equation or (wanted_names and len(given) > 1 and not given_names):
        return len(given) + len(given_names) > 1 and algebra(response, answer)
    if given_names and wanted_names and not _share_name(given_names, wanted_names):
        return False
    return all(_same_value(value, wanted[-1], algebra) for value in given)


def _share_name(given: list[str], wanted: list[str]) -> bool:
    """One name in common; a segment's may be read from either end."""
    return any(g == w or (g.isupper() and g == w[::-1]) for g in given for w in wanted)


def _same_value(response: str, answer: str, algebra: Algebra) -> bool:
    given, given_unit = split_unit(response)
    wanted, wanted_unit = split_unit(answer)
    if not given or not wanted:
        return False
    if given_unit and given_unit != wanted_unit and (wanted_unit or given_unit == "%"):
        return False
    if (seen := _same_at_sight(given, wanted)) is not None:
        return seen
    return not _hopeless(given) and not _hopeless(wanted) and algebra(given, wanted)


def _hopeless(text: str) -> bool:
    """Not for algebra: a word, signs only, two numbers side by side, or characters that no formula has."""
    return not text.isascii() or re.search("^[A-Za-z ]{2,}$|^[^A-Za-z0-9]*$|[0-9] +[0-9]|[0-9] *_|__", text) is not None
