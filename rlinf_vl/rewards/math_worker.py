"""The grading worker: reads [response, answer] as JSON, one a line, and writes {"same": bool} (run by `GradingPool`).

A timer of the kernel's ends it when a question takes too much processor time: even while Python is stuck in one
big-number operation, whether or not its parent still lives, and not because the machine is busy with something else.
Memory is limited too.
"""

import json
import os
import resource
import signal
import sys
from fractions import Fraction

from rlinf_vl.rewards.comparison import same
from rlinf_vl.rewards.numbers import is_rounding, parse_number, stands_for

MEMORY_BYTES = 1 << 30
"""Address space of the worker: ten times what its imports need."""

_EQUAL = Fraction(1, 10**12)
"""Relative difference below which two closed forms, evaluated to 30 digits, are the same number."""


def algebra(response: str, answer: str) -> bool:
    """Whether math-verify finds two formulas the same; numbers are compared by value, roundings allowed."""
    from math_verify import verify
    from sympy import Expr

    given, wanted = _parse(response), _parse(answer)
    if given is None or wanted is None:
        return False
    if all(isinstance(x, Expr) and not x.free_symbols for x in (given, wanted)):
        a, b = _value(response, given), _value(answer, wanted)
        if a is None or b is None:
            return False
        return _same_values(response, a, answer, b)
    return bool(verify(wanted, given, timeout_seconds=None))


def _same_values(response: str, a: Fraction, answer: str, b: Fraction) -> bool:
    if abs(a - b) <= _EQUAL * max(abs(a), abs(b)):
        return True
    given, wanted = parse_number(response), parse_number(answer)
    if given is not None:
        return is_rounding(given, b)
    return wanted is not None and stands_for(wanted, a)


def _parse(text: str):
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _value(text: str, formula) -> Fraction | None:
    """The number that a formula is; None if it isn't a finite real one."""
    if (number := parse_number(text)) is not None:
        return number.value
    value = formula.evalf(30)
    return Fraction(str(value)) if value.is_Float or value.is_Integer or value.is_Rational else None


def main(limit_s: float) -> None:
    """Answer questions until the input ends, each within `limit_s` seconds of processor time."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that a library prints gets between the replies
    try:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        algebra(r"\sqrt{12}", r"2\sqrt{3}")  # imports, and fills the parser's caches
        algebra("1+x", "x+1")
    except Exception as e:
        replies.write(json.dumps({"error": f"{type(e).__name__}: {e}"}) + "\n")
        return
    replies.write("{}\n")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            verdict = same(*json.loads(line), algebra)
        except Exception:  # MemoryError and RecursionError too: what can't be understood is wrong
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps({"same": verdict}) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
