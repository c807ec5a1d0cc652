"""The table of built-in reward functions, by name."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlinf_vl.errors import nearest
from rlinf_vl.rewards.boxes import bbox_giou, point_in_box, reference_box
from rlinf_vl.rewards.choices import choice
from rlinf_vl.rewards.forms import ACCEPTED_CALLS, RewardFunction
from rlinf_vl.rewards.judge import Judge
from rlinf_vl.rewards.latex import last_boxed
from rlinf_vl.rewards.math_grader import MAX_LENGTH, check_reference, math_verdict
from rlinf_vl.rewards.texts import (
    anls,
    exact,
    exact_alnum,
    format_reward,
    length,
    overlong,
    references,
    with_truths,
)
from rlinf_vl.user_code import CodeError


class Named(NamedTuple):
    """A built-in reward function, a row of `NAMED`.

    Attributes:
        function: a callable of (response, answer) and of the keywords in its signature; see
            docs/rewards.md. A class is instantiated with the entry's kwargs and with `hosts`, and
            its instance is called.
        judges: whether it judges answers, and not just their form.
        check: raises `GradingError` if no response can be compared with this reference answer.
    """

    function: Callable[..., Any]
    judges: bool = True
    check: Callable[[str], Any] | None = None


def math(final_response: str, answer: str) -> bool:
    r"""Return whether the last `\boxed{…}` is the reference answer, or one of several.

    `rlinf_vl.rewards.math_grader` compares. The brackets of a reference that is a list of three
    numbers or more may be left out: `\boxed{1, 2, 3}`. Those of two numbers may not: a pair in
    brackets may be an interval.
    """
    reference_texts = references(answer) if answer.startswith('["') else [answer]
    if any(math_verdict(final_response, reference) for reference in with_truths(reference_texts)):
        return True
    # Retry with the brackets of the reference around a box that has no brackets itself.
    box = last_boxed(final_response, MAX_LENGTH) if _NUMBERS.fullmatch(answer) else None
    return (
        box is not None
        and not re.search(r"[()\[\]]", box)
        and math_verdict(f"\\boxed{{[{box}]}}", answer)
    )


#: A list of three numbers or more, as data sets write it: "[1, 2.5, -3]".
_NUMBERS = re.compile(r"\[-?[0-9.]+(?:, -?[0-9.]+){2,}\]")
NAMED: dict[str, Named] = {
    "math": Named(math, check=check_reference),
    "exact": Named(exact),
    "exact_alnum": Named(exact_alnum),
    "choice": Named(choice),
    "anls": Named(anls),
    "bbox_giou": Named(bbox_giou, check=reference_box),
    "point_in_box": Named(point_in_box, check=reference_box),
    "judge": Named(Judge),
    "format": Named(format_reward, judges=False),
    "length": Named(length, judges=False),
    "overlong": Named(overlong, judges=False),
}


def named_function(
    name: str, kwargs: Mapping[str, Any], hosts: Sequence[str] = ()
) -> tuple[RewardFunction, bool]:
    """Return a built-in function with its keywords, and whether it judges answers.

    Args:
        name: the function's name in `NAMED`.
        kwargs: the keywords of its entry in `reward.functions`.
        hosts: hosts that a judge may send requests to.

    Raises:
        CodeError: no function has this name, or it doesn't take the keywords.
    """
    if name not in NAMED:
        names = ", ".join(sorted(NAMED))
        raise CodeError(
            f"no reward function {name!r}; there are {names}; write module:name or "
            f"path/to/file.py:name for one of yours ({ACCEPTED_CALLS});"
            f"{nearest(name, NAMED)}".rstrip(";")
        )
    named = NAMED[name]
    if isinstance(named.function, type):
        try:
            return RewardFunction(named.function(**kwargs, hosts=hosts), name, {}), named.judges
        except (TypeError, ValueError) as error:
            raise CodeError(
                f"{name!r}: {error}; kwargs are {inspect.signature(named.function)}"
            ) from error
    function = RewardFunction(named.function, name, kwargs)
    for missing_key in function.needed() - kwargs.keys():
        raise CodeError(f"{name!r} needs kwargs: {{{missing_key}: …}}")
    return function, named.judges
