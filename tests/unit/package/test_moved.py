"""Modules that moved are found by their old names, as the same modules."""

import importlib
import pickle

import pytest

import rlinf_vl


@pytest.mark.parametrize(("old", "new"), rlinf_vl.MOVED.items())
def test_an_old_name_is_the_module(old, new):
    module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__spec__.name == new == module.__name__


def test_a_module_of_a_package_that_moved():
    from rlinf_vl.agents.contract import AgentResult as by_old_name

    from rlinf_vl.extras.agents.contract import AgentResult

    assert by_old_name is AgentResult and pickle.loads(pickle.dumps(AgentResult)) is AgentResult
    with pytest.raises(ModuleNotFoundError, match="rlinf_vl.extras.agents.nothing"):
        importlib.import_module("rlinf_vl.agents.nothing")
