r"""The comparison of a response's last `\boxed{…}` with the reference answer.

Answers that need no algebra (numbers, names, units, lists of them) are compared here, in any
thread. Formulas are compared by a worker process under limits of time and memory
(`rlinf_vl.rewards.grading_pool`).
"""

import atexit
import os
import re
from functools import lru_cache

from rlinf_vl.rewards.comparison import NeedsAlgebra, same
from rlinf_vl.rewards.grading_pool import GradingError, GradingPool, GradingTimeout
from rlinf_vl.rewards.latex import last_boxed, normalise

#: Longest box that is read, in characters: answers are short, a longer one is an attack or prose.
MAX_LENGTH = 1000
_ANSWER_TAG = re.compile("<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
#: Signs of a formula that may take long; a reference without one needs no trial before training.
_COSTLY = re.compile(r"\^ ?(?!\\circ)|!|[0-9]{40}|\\(?:sum|prod|[io]*int|binom|lim)(?![a-z])")
#: The pool of this process: all threads share its server, which starts on first use.
_POOL = GradingPool()


def grade_math(response: str, answer: str) -> bool:
    """Return whether the response is right by `math_verdict`; False without a verdict.

    Raises:
        RuntimeError: as `math_verdict`.
    """
    try:
        return math_verdict(response, answer)
    except GradingError:
        return False


def math_verdict(response: str, answer: str) -> bool:
    r"""Return whether the last `\boxed{…}` of `response` is `answer`, which may have a box or not.

    Nothing outside the box counts; no box, an empty or an unbalanced one is wrong.
    `rlinf_vl.rewards.comparison` defines equality. The function is safe in any thread and takes at
    most `GradingPool`'s limits (plus, on first use, its start).

    Raises:
        GradingTimeout: the comparison took too much time or memory.
        GradingError: the process that compares died.
        RuntimeError: no such process can be started (math-verify is missing, say).
    """
    box, reference = last_boxed(response, MAX_LENGTH), _reference(answer)
    if box is None or reference is None:
        return False
    answer_text = normalise(box)
    # The length is checked again, since normalising makes texts longer: ½ is eleven characters.
    return len(answer_text) <= MAX_LENGTH and _same(answer_text, reference)


def check_reference(answer: str) -> None:
    """Check before training that responses can be compared with this reference answer.

    A costly reference is compared with itself once.

    Raises:
        GradingError: the reference is empty, longer than `MAX_LENGTH`, in a broken box, or takes
            too much time or memory.
        RuntimeError: as `math_verdict`.
    """
    reference = _reference(answer)
    if not reference:
        raise GradingError(
            f"the reference answer {answer[:80]!r} is empty, too long or in a broken box"
        )
    # The first may fail on a busy machine.
    for attempt in range(2 if _COSTLY.search(reference) else 0):
        try:
            # "0+" makes the texts differ; equal ones would be the same without any algebra.
            _same(f"0+{reference}", reference)
            return
        except GradingTimeout as e:
            if attempt:
                raise GradingTimeout(
                    f"the reference answer {answer[:80]!r} can't be evaluated: {e}"
                ) from e


def stop_grading() -> None:
    """End the grading processes now; the next call that needs them starts new ones.

    Without this call they end with this process.
    """
    _POOL.close()


def _new_pool() -> None:
    """Give a forked child its own pool: two processes must not share a server's socket."""
    global _POOL
    _POOL = GradingPool()


atexit.register(stop_grading)
os.register_at_fork(after_in_child=_new_pool)


def _reference(answer: str) -> str | None:
    """Return the reference out of its tag and box, normalised; None if broken or too long."""
    tag_contents = _ANSWER_TAG.findall(answer) if "<" in answer else []
    text = tag_contents[-1] if tag_contents else answer
    if "\\boxed" in text:
        text = last_boxed(text, MAX_LENGTH)
    return None if text is None or len(text) > MAX_LENGTH else normalise(text)


@lru_cache(maxsize=4096)  # the responses of a group repeat each other
def _same(answer_text: str, reference: str) -> bool:
    """Return whether two normalised texts are the same, in this thread or by the pool."""
    try:
        return same(answer_text, reference, algebra=False)
    except NeedsAlgebra:
        return _POOL.same(answer_text, reference)
