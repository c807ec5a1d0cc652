"""The grading processes end with these tests, not with the session."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from rlinf_vl.rewards import GradingTimeout, math_grader, stop_grading
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
