"""The grading processes end with these tests, not with the session."""

from collections.abc import Iterator

import pytest

from rlinf_vl.rewards import math_grader, stop_grading
from rlinf_vl.rewards.grading_pool import GradingPool


@pytest.fixture(scope="package", autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    stop_grading()


@pytest.fixture
def pool() -> GradingPool:
    """The grader's pool, its server up: starting one takes most of a second."""
    assert math_grader._POOL.same(r"\sqrt{4}", "2")
    return math_grader._POOL
