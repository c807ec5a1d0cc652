"""Processes that are FSDP2 ranks over gloo, one layout after another: to start one costs seconds, to use it again nothing."""

import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def _serve(rank: int, jobs, out) -> None:
    """One process: be rank `rank` of each job's process group until there are no more jobs."""
    import torch.distributed as dist

    from rlinf_vl.actor.mesh import join_ranks

    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        function, size, port, arguments = job
        try:
            join_ranks("cpu", rank, size, ("127.0.0.1", port))
            out.put((rank, function(*arguments), None))
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            out.put((rank, None, traceback.format_exc()))
            raise


class RankProcesses:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._out = self._context.Queue()
        self._jobs: list[Any] = []
        self._processes: list[Any] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(*arguments)`, a module's own, returns on each of `size` ranks of a process group."""
        for rank in range(len(self._jobs), size):
            self._jobs.append(self._context.Queue())
            process = self._context.Process(target=_serve, args=(rank, self._jobs[rank], self._out), daemon=True)
            process.start()
            self._processes.append(process)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for jobs in self._jobs[:size]:
            jobs.put((function, size, port, arguments))
        found = {}
        while len(found) < size:
            rank, result, error = self._out.get(timeout=120)
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = result
        return [found[rank] for rank in range(size)]

    def stop(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(timeout=20)
            process.kill()
