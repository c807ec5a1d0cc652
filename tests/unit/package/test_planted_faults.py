"""Each edit of tests/planted_faults.py still applies, so that the list can be run at any time."""

import pytest
from planted_faults import FAULTS, ROOT, DoesNotApply, Fault, located


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault):
    path = located(fault)
    compile(path.read_text().replace(fault.old, fault.new), path, "exec")
    assert fault.page in ("architecture", "reliability") and fault.new != fault.old
    assert all((ROOT / test).is_file() for test in fault.tests) and fault.tests


def test_there_are_forty_with_different_names():
    assert len(FAULTS) >= 40 and len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("old", ["import", "this text stands nowhere"])
def test_an_edit_that_no_longer_applies_is_named(old):
    fault = Fault(name="outdated", page="", promise="", old=old, new="", tests=())
    with pytest.raises(DoesNotApply, match="fault 'outdated'.*not exactly once"):
        located(fault)
