"""Engines of several slots."""

import pytest

from rlinf_vl.config import ConfigError
from rlinf_vl.controller.launch import _chunks


def test_chunks():
    assert _chunks((0, 1, 2), 1, shared=True) == [(0,), (1,), (2,)]
    assert _chunks((4, 5, 6, 7), 2, shared=False) == [(4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("slots", "shared", "says"), [((0, 1), True, "split them"), ((0, 1, 2), False, "divide the 3")]
)
def test_what_does_not_work_is_refused(slots, shared, says):
    with pytest.raises(ConfigError, match=says):
        _chunks(slots, 2, shared)
