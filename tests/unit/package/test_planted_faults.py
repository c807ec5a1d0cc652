"""Each edit of tests/planted_faults.py still applies, so that the list can be run at any time."""

import ast

import pytest
from edits import DoesNotApply, parsed, replaced
from planted_faults import FAULTS, ROOT, Fault, edited


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault):
    path, source = edited(fault)
    assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(path.read_text()))
    assert fault.page in ("architecture", "reliability")
    assert all((ROOT / test).is_file() for test in fault.tests) and fault.tests


def test_there_are_forty_with_different_names():
    assert len(FAULTS) >= 40 and len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize(
    ("place", "old"), [("GroupStore.put", "nowhere()"), ("nobody", "pass"), ("", "2")]
)
def test_an_edit_that_no_longer_applies_is_named(place, old):
    fault = Fault(name="outdated", page="", promise="", place=place, old=old, new="", tests=())
    with pytest.raises(DoesNotApply, match="fault 'outdated'.* stands "):
        edited(fault)


def test_a_node_is_replaced_whatever_its_layout():
    source = "def f(x):\n    return g(  # a comment, é\n        x,\n        'é',\n    ) + 1\n"
    call = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    assert ast.dump(call) == ast.dump(parsed("g(x, 'é')"))
    assert replaced(source, call, "h()") == "def f(x):\n    return h() + 1\n"
    statement = ast.parse(source).body[0].body[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert replaced(source, statement, "y = 1\nreturn y") == "def f(x):\n    y = 1\n    return y\n"
