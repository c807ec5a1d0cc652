"""Processes that are FSDP2 ranks over gloo, one layout after another: to start one costs seconds, to use it again nothing."""

import queue
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from rlinf_vl.transport.rendezvous import find, listen


def _serve(rank: int, jobs, out) -> None:
    """One process: be rank `rank` of each job's process group until there are no more jobs."""
    import torch.distributed as dist

    from rlinf_vl.actor.mesh import join_ranks

    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        function, size, address, arguments = job
        try:
            join_ranks("cpu", rank, size, find(address))
            result = function(*arguments)
            dist.barrier()
            dist.destroy_process_group()
            out.put((rank, result, None))
        except BaseException:
            out.put((rank, None, traceback.format_exc()))
            raise


class RankProcesses:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._begin()

    def _begin(self) -> None:
        self._out = self._context.Queue()
        self._jobs: list[Any] = []
        self._processes: list[Any] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(*arguments)`, a module's own, returns on each of `size` ranks of a process group. Where a rank
        fails, no process of it is used again."""
        for rank in range(len(self._jobs), size):
            self._jobs.append(self._context.Queue())
            process = self._context.Process(
                target=_serve, args=(rank, self._jobs[rank], self._out), daemon=True
            )
            process.start()
            self._processes.append(process)
        store, address = listen("127.0.0.1")
        for jobs in self._jobs[:size]:
            jobs.put((function, size, address, arguments))
        found: dict[int, Any] = {}
        try:
            while len(found) < size:
                rank, result, error = self._next()
                assert error is None, f"rank {rank}:\n{error}"
                found[rank] = result
        except BaseException:
            for process in self._processes:
                process.kill()
            self._begin()
            raise
        del store  # it listened until here
        return [found[rank] for rank in range(size)]

    def _next(self) -> Any:
        """What a rank says next. Fails when one has died and says no more."""
        while True:
            died = [
                f"rank {i} ({p.exitcode})"
                for i, p in enumerate(self._processes)
                if not p.is_alive()
            ]
            try:
                return self._out.get(timeout=5)
            except queue.Empty:
                assert not died, f"died without a word: {', '.join(died)}"

    def stop(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(timeout=20)
            process.kill()
