"""Measure what two processes of this machine exchange over gloo."""

import subprocess
import sys
import tempfile
from pathlib import Path

_CODE = """
import sys, time, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
def seconds(size):
    x = torch.zeros(size)
    times = []
    for _ in range(7):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - start)
    return min(times)
small, large = seconds(16), seconds(2**21)
if rank == 0:
    print(small, large)
"""


def exchange_rate() -> tuple[float, float]:
    """Return (bytes a second from rank to rank, seconds of a small collective).

    They are of the clock, the least of several: an exchange waits.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _CODE, str(rank), path],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    small, large = map(float, outputs[0].split())
    # An all-reduce of n ranks moves 2·(n - 1)/n of its bytes.
    return 4 * 2**21 / max(large - small, 1e-6), small
