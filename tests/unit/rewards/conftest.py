"""The grading processes end with these tests, not with the session."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest

from rlinf_vl.rewards import GradingTimeout, math_grader, math_verdict, stop_grading
from rlinf_vl.rewards.comparison import same
from rlinf_vl.rewards.grading_pool import GradingPool


@pytest.fixture(scope="package", autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    stop_grading()


@pytest.fixture
def pool() -> GradingPool:
    """The grader's pool, its server up: starting one takes most of a second."""
    for _ in range(5):
        with suppress(GradingTimeout):  # on a busy machine its first answer may be late
            assert math_grader._POOL.same(r"\sqrt{4}", "2")
            break
    return math_grader._POOL


class _Formula(Exception):
    """The comparison takes algebra."""


@pytest.fixture
def misjudged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """Return those pairs of (response, reference, whether it is paid) that are judged otherwise, in this process.

    Those that take algebra are left out, as that may take long; with `algebra` they are judged, too.
    """

    def find(
        pairs: Iterable[tuple[str, str, bool]], algebra: bool = False
    ) -> list[tuple[str, str]]:
        def ask(response: str, answer: str) -> bool:
            if not algebra:
                raise _Formula
            return same(response, answer, algebra=True)

        math_grader._same.cache_clear()  # what was asked before
        monkeypatch.setattr(math_grader._POOL, "same", ask)
        wrong = []
        for response, answer, paid in pairs:
            with suppress(_Formula):
                if math_verdict(response, answer) is not paid:
                    wrong.append((response, answer))
        return wrong

    return find
