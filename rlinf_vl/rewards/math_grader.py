r"""Is a response's last `\boxed{…}` the answer?

Whatever needs no algebra (numbers, names, units, lists of them) is settled here, in any thread; the rest goes to a worker
process under limits of time and memory (`rlinf_vl.rewards.grading_pool`).
"""

from functools import lru_cache

from rlinf_vl.rewards.comparison import same
from rlinf_vl.rewards.grading_pool import GradingError, GradingPool
from rlinf_vl.rewards.latex import last_boxed, normalise

MAX_LENGTH = 1000
"""Longest box, in characters, that is looked at: answers are short, and a longer one is an attack or a monologue."""

_POOL = GradingPool()


class _NeedsAlgebra(Exception):
    pass


def grade_math(response: str, answer: str) -> bool:
    """Whether `math_verdict` finds the response right; without a verdict it is wrong.

    Raises:
        RuntimeError: as `math_verdict`.
    """
    try:
        return math_verdict(response, answer)
    except GradingError:
        return False


def math_verdict(response: str, answer: str) -> bool:
    r"""Whether the last `\boxed{…}` of `response` is `answer`, which may itself stand in a box or not.

    Nothing outside the box counts; no box, an empty or an unbalanced one is wrong. What counts as the same is told in
    `rlinf_vl.rewards.comparison`. Safe in any thread; bounded by `GradingPool`'s limits (plus, on first use, its start).

    Raises:
        GradingTimeout: the comparison took too much time or memory.
        GradingError: the process that compares died.
        RuntimeError: no such process can be started (math-verify is missing, say).
    """
    given = last_boxed(response, MAX_LENGTH)
    wanted = last_boxed(answer, MAX_LENGTH) if "\\boxed" in answer else answer
    if given is None or wanted is None or len(wanted) > MAX_LENGTH:
        return False
    given, wanted = normalise(given), normalise(wanted)
    try:
        return same(given, wanted, _no_algebra)
    except _NeedsAlgebra:
        return _ask(given, wanted)


def stop_grading() -> None:
    """End the grading processes now instead of with this process; the next call that needs them starts others."""
    _POOL.close()


def _no_algebra(response: str, answer: str) -> bool:
    raise _NeedsAlgebra


@lru_cache(maxsize=4096)  # the responses of a group repeat each other
def _ask(given: str, wanted: str) -> bool:
    return _POOL.same(given, wanted)
