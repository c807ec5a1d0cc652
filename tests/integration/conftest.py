"""What tests of several ranks share."""

import pytest
from rank_processes import RankProcesses


@pytest.fixture(scope="module")
def processes():
    """Ranks in processes of their own, for all tests of a module."""
    processes = RankProcesses()
    yield processes
    processes.stop()
