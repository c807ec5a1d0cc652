"""The grading process ends with these tests, not with the session."""

from collections.abc import Iterator

import pytest

from rlinf_vl.rewards import stop_grading


@pytest.fixture(scope="package", autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    stop_grading()
