r"""Is a response's last `\boxed{…}` the answer?

What can be settled by reading (equal strings, plain numbers) is settled here, in any thread; what needs algebra goes to
a worker process under a time limit (`rlinf_vl.rewards.grading_pool`).
"""

from rlinf_vl.rewards.comparison import same
from rlinf_vl.rewards.grading_pool import GradingPool
from rlinf_vl.rewards.latex import last_boxed, normalise

MAX_LENGTH = 1000
"""Longest box, in characters, that is looked at: answers are short, and a longer one is an attack or a monologue."""

_POOL = GradingPool()


class _NeedsAlgebra(Exception):
    pass


def grade_math(response: str, answer: str) -> bool:
    r"""Whether the last `\boxed{…}` of `response` is `answer`, which may itself stand in a box or not.

    Nothing outside the box counts; no box, an empty or an unbalanced one is wrong. What counts as the same is told in
    `rlinf_vl.rewards.comparison`. Safe in any thread; one call takes at most `GradingPool.limit_s` of the worker's
    time (plus, on first use, its start, and the wait for other threads' calls); what takes longer is wrong.

    Raises:
        RuntimeError: the worker process can't be started (math-verify is missing, say).
    """
    given = last_boxed(response, MAX_LENGTH)
    wanted = last_boxed(answer, MAX_LENGTH) if "\\boxed" in answer else answer[: MAX_LENGTH + 1]
    if given is None or wanted is None or len(wanted) > MAX_LENGTH:
        return False
    given, wanted = normalise(given), normalise(wanted)
    try:
        return same(given, wanted, _refuse)
    except _NeedsAlgebra:
        return _POOL.same(given, wanted)


def stop_grading() -> None:
    """End the worker process now instead of with this process; the next call that needs it starts another."""
    _POOL.close()


def _refuse(response: str, answer: str) -> bool:
    raise _NeedsAlgebra
