"""Measure how much slower a process computes while the machine's other cores compute, too.

Cores share caches, memory, and sometimes the units of one core.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable

from rlinf_vl.preflight.rates import MOST_AT_ONCE

REPEATS = 3
_CODE = """
import sys, torch
hidden, inner = map(int, sys.argv[1:])
torch.set_num_threads(1)
x = torch.randn(256, hidden)
up, down = torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden)
print("ready", flush=True)
while True:
    loss = (x + down(torch.nn.functional.silu(up(x)))).square().mean()
    loss.backward()
"""


def full_slowdown(seconds_of: Callable[[], float], cores: int, hidden: int, inner: int) -> float:
    """Return the seconds of `seconds_of()` while all cores compute, over those of it alone; >= 1.

    Of many cores `MOST_AT_ONCE` compute. Neighbours train a block of the same sizes.

    Args:
        hidden, inner: sizes of the model's hidden states, and of its blocks' inner ones.
    """
    if cores < 2:
        return 1.0
    alone = statistics.median(seconds_of() for _ in range(REPEATS))
    command = [sys.executable, "-c", _CODE, str(hidden), str(inner)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    neighbours = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(min(cores, MOST_AT_ONCE) - 1)
    ]
    try:
        for process in neighbours:
            assert process.stdout is not None
            process.stdout.readline()
        together = statistics.median(seconds_of() for _ in range(REPEATS))
    finally:
        for process in neighbours:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    return max(1.0, together / alone)
