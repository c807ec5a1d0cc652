"""Wrong configs, code and data sets, as a stranger gives them: each refused by the command line before torch or Ray are imported,
without a traceback, with the message of tests/golden/refusals.txt.

`python tests/unit/config/test_wrong.py` runs each in a process of its own, and prints how long it takes: on the wall, and of a CPU,
which other work on the machine does not stretch.
"""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from refusals import read_table, write_files

TESTS = Path(__file__).resolve().parents[2]
#: Cases that are typed on this machine as it is.
CASES = [
    case
    for case in read_table()
    if re.match(
        r"\$ train .*\.yaml|\$ train \S+ (data|reward|runner|algorithm)\.", case.provoked_by
    )
][::3]
#: Renders each case in a fork of a process that has imported the command line, its config parsed as a user's is.
PROGRAM = """
import json, os, sys
from refusals import Renderer, read_table
with Renderer(quick=False) as renderer:
    for case in (case for case in read_table() if case.name in sys.argv[1:]):
        if not (child := os.fork()):
            rendered = renderer.render(case)
            slow = sorted({"ray", "torch", "transformers", "datasets"} & set(sys.modules))
            print(json.dumps([rendered.message, slow]), flush=True)
            os._exit(0)
        assert not os.waitpid(child, 0)[1], case
"""


@pytest.mark.slow
def test_refused_before_anything_slow():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(case.name for case in CASES)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    rendered = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rendered) > 60
    assert rendered == [[case.message, []] for case in CASES]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        seconds, cpu, used = [], [], 0.0
        for case in CASES:
            start = time.monotonic()
            words = shlex.split(case.provoked_by.removeprefix("$ train"))
            command = [sys.executable, "-m", "rlinf_vl", "train", "--check", *words]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            seconds.append(time.monotonic() - start)
            total = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            cpu, used = [*cpu, total - used], total
            print(f"{seconds[-1]:5.2f} s, CPU {cpu[-1]:4.2f} s  [{done.returncode}] {case.name}")
        for clock, measured in (("wall", seconds), ("CPU", cpu)):
            median = sorted(measured)[len(measured) // 2]
            print(f"{clock}: the slowest {max(measured):.2f} s, the median {median:.2f} s")
