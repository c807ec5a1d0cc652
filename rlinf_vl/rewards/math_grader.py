r"""Is a response's last `\boxed{…}` the answer?

Answers that need no algebra (numbers, names, units, lists of them) are compared here, in any thread; formulas are compared
by a worker process under limits of time and memory (`rlinf_vl.rewards.grading_pool`).
"""

import atexit
import os
import re
from functools import lru_cache

from rlinf_vl.rewards.comparison import NeedsAlgebra, same
from rlinf_vl.rewards.grading_pool import GradingError, GradingPool, GradingTimeout
from rlinf_vl.rewards.latex import last_boxed, normalise

MAX_LENGTH = 1000
"""Longest box, in characters, that is read: answers are short, and a longer one is an attack or a monologue."""
_ANSWER_TAG = re.compile("<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_COSTLY = re.compile(r"\^ ?(?!\\circ)|!|[0-9]{40}|\\(?:sum|prod|[io]*int|binom|lim)(?![a-z])")
"""What a formula must have to take long; a reference without it needs no trial."""
_POOL = GradingPool()


def grade_math(response: str, answer: str) -> bool:
    """Whether `math_verdict` finds the response right; without a verdict it is wrong. Raises RuntimeError as that does."""
    try:
        return math_verdict(response, answer)
    except GradingError:
        return False


def math_verdict(response: str, answer: str) -> bool:
    r"""Whether the last `\boxed{…}` of `response` is `answer`, which may itself stand in a box or not.

    Nothing outside the box counts; no box, an empty or an unbalanced one is wrong. `rlinf_vl.rewards.comparison` says what
    counts as the same. Safe in any thread; bounded by `GradingPool`'s limits (plus, on first use, its start).

    Raises:
        GradingTimeout: the comparison took too much time or memory.
        GradingError: the process that compares died.
        RuntimeError: no such process can be started (math-verify is missing, say).
    """
    box, wanted = last_boxed(response, MAX_LENGTH), _reference(answer)
    if box is None or wanted is None:
        return False
    given = normalise(box)
    return len(given) <= MAX_LENGTH and _same(given, wanted)  # ½ is eleven characters of LaTeX


def check_reference(answer: str) -> None:
    """Try, before training, whether responses can be compared with this reference answer: a costly one is, with itself.

    Raises:
        GradingError: it is empty, longer than `MAX_LENGTH`, in a broken box, or takes too much time or memory.
        RuntimeError: as `math_verdict`.
    """
    wanted = _reference(answer)
    if not wanted:
        raise GradingError(f"the reference answer {answer[:80]!r} is empty, too long or in a broken box")
    for attempt in range(2 if _COSTLY.search(wanted) else 0):  # the first may fail on a busy machine
        try:
            _same(f"0+{wanted}", wanted)
            return
        except GradingTimeout as e:
            if attempt:
                raise GradingTimeout(f"the reference answer {answer[:80]!r} can't be evaluated: {e}") from e


def stop_grading() -> None:
    """End the grading processes now instead of with this process; the next call that needs them starts others."""
    _POOL.close()


def _new_pool() -> None:
    """Give a forked child a pool of its own; it must not share its parent's server."""
    global _POOL
    _POOL = GradingPool()


atexit.register(stop_grading)
os.register_at_fork(after_in_child=_new_pool)


def _reference(answer: str) -> str | None:
    """The reference out of its tag and box, normalised; None if its box is broken or it is too long."""
    tagged = _ANSWER_TAG.findall(answer) if "<" in answer else []
    wanted = tagged[-1] if tagged else answer
    if "\\boxed" in wanted:
        wanted = last_boxed(wanted, MAX_LENGTH)
    return None if wanted is None or len(wanted) > MAX_LENGTH else normalise(wanted)


@lru_cache(maxsize=4096)  # the responses of a group repeat each other
def _same(given: str, wanted: str) -> bool:
    try:
        return same(given, wanted, algebra=False)
    except NeedsAlgebra:
        return _POOL.same(given, wanted)
