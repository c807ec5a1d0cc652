"""Hydra takes 40 ms to compose a file that does not change, and 300 tests here ask for the same one: it is composed once."""

import copy
from functools import cache

import pytest

from rlinf_vl.config import load

_compose = load._compose
_compose_once = cache(_compose)


@pytest.fixture(autouse=True)
def compose_examples_once(monkeypatch):
    def compose(path):
        return (
            copy.deepcopy(_compose_once(path))
            if path.is_relative_to(load.EXAMPLES_DIR)
            else _compose(path)
        )

    monkeypatch.setattr(load, "_compose", compose)
