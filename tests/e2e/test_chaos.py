"""A whole run on three hosts that are struck at random; .ci/run has it, the other tests leave it out (it takes ten minutes)."""

import subprocess
import sys

import pytest
from hosts import POSSIBLE, ROOT


@pytest.mark.chaos
@pytest.mark.e2e
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not POSSIBLE, reason="needs root, and ip of iproute2")
def test_five_minutes_of_chaos(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/chaos.py"), "--minutes", "5", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    print(done.stdout)
