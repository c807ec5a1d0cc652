"""Runs a sweep: each run is a process `rlinf-vl train`, so one that fails takes no other with it.

The same command again goes on: runs that are done are skipped, and every other one begins at its
newest checkpoint. Runs have sessions of their own. The first Ctrl-C is passed on to those that are
under way, which save, and no other is started; the second ends them at once. If this process is
killed, the kernel asks them to stop.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

from rlinf_vl.config.load import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.gpus import gpu_memory, is_private
from rlinf_vl.runtime.run_folder import is_locked, locked
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.tools.sweep.plan import Sweep, SweepRun, write_sweep
from rlinf_vl.user_code import end_with_parent

log = logging.getLogger(__name__)

POLL_S = 0.2
#: Seconds that runs have to end after a second Ctrl-C, before they are killed.
KILL_S = 20.0


@dataclass(slots=True)
class Started:
    """A run under way."""

    run: SweepRun
    process: subprocess.Popen
    started_s: float


def run_sweep(sweep: Sweep, parallel: int, stop: StopRequest) -> int:
    """Run what is left of the sweep, `parallel` runs at a time.

    Returns:
        The exit code: 0 if every run is done, 1 if one failed, 128 + the signal after Ctrl-C.
    """
    _check_parallel(sweep, parallel)
    with locked(sweep.folder):
        write_sweep(sweep)
        log.info("sweep %s: %s", sweep.folder, _summary(sweep))
        failed = _run_all(sweep, parallel, stop)
        log.info("sweep %s: %s", sweep.folder, _summary(sweep))
    for run, code in failed.items():
        reason = str(read_status(sweep.folder / run).get("reason") or "see its last lines")
        log.error("run %s failed with exit code %d: %s", run, code, reason.splitlines()[0])
    if stop.number is not None:
        log.info("the same command again goes on with the sweep")
        return 128 + stop.number
    return 1 if failed else 0


def _summary(sweep: Sweep) -> str:
    """Return how many runs are done, in words."""
    n_done = sum(map(sweep.is_done, sweep.runs))
    return f"{n_done} of {len(sweep.runs)} runs are done"


def _check_parallel(sweep: Sweep, parallel: int) -> None:
    """Raise ConfigError if runs side by side would use the same GPUs without knowing it."""
    if parallel < 1:
        raise ConfigError(f"--parallel {parallel}: give a number from 1 on")
    if parallel == 1:
        return
    config = load_config(sweep.config, sweep.overrides(sweep.runs[0]))
    on_gpus = config.cluster.device == "cuda" or (
        config.cluster.device == "auto" and bool(gpu_memory())
    )
    if on_gpus and (config.cluster.backend == "local" or is_private(config)):
        raise ConfigError(
            f"--parallel {parallel}: each run would start Ray for itself and take this machine's "
            "GPUs; start one cluster for all (bash ray_utils/start_ray.sh), which gives each run "
            "slots of its own, or leave --parallel out"
        )


def _run_all(sweep: Sweep, parallel: int, stop: StopRequest) -> dict[str, int]:
    """Run what is left of the sweep; returns the exit codes of the runs that failed."""
    n_started = 0
    waiting = [run for run in sweep.runs if not sweep.is_done(run)]
    n_left = len(waiting)
    active, failed = list[Started](), dict[str, int]()
    stop.graceful = True
    is_signalled = False
    try:
        while True:
            while waiting and len(active) < parallel and stop.number is None:
                run = waiting.pop(0)
                n_started += 1
                log.info("run %d of %d: %s", n_started, n_left, run.name)
                if _wait_until_free(sweep, run, stop):
                    active.append(_start(sweep, run, to_file=parallel > 1))
            if not active:
                return failed
            if stop.number is not None and not is_signalled:
                is_signalled = True
                _signal_all(active, signal.Signals(stop.number))
            for started in [s for s in active if s.process.poll() is not None]:
                active.remove(started)
                code, minutes = (
                    started.process.returncode,
                    (time.monotonic() - started.started_s) / 60,
                )
                log.info(
                    "run %s ended with exit code %d after %.1f min", started.run.name, code, minutes
                )
                if code and stop.number is None:
                    failed[started.run.name] = code
            time.sleep(POLL_S)
    finally:
        _end(active)


def _wait_until_free(sweep: Sweep, run: SweepRun, stop: StopRequest) -> bool:
    """Wait until no process has the run's folder; returns whether none has.

    A run whose sweep was killed is still writing its checkpoint when the same command is given at
    once.
    """
    run_dir = sweep.run_dir(run)
    if is_locked(run_dir):
        log.info("run %s is still in use by a former process; waiting for its end", run.name)
    while is_locked(run_dir) and stop.number is None:
        time.sleep(POLL_S)
    return stop.number is None


def _start(sweep: Sweep, run: SweepRun, to_file: bool) -> Started:
    """Start a run, whose output goes to this terminal or to `NAME.log` in the sweep's folder."""
    command = [sys.executable, "-m", "rlinf_vl", "train", sweep.config, *sweep.overrides(run)]
    end_with_sweep = partial(end_with_parent, os.getpid(), signal.SIGTERM)
    with ExitStack() as stack:
        output: IO[bytes] | None = None
        if to_file:
            output = stack.enter_context((sweep.folder / f"{run.name}.log").open("ab"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
            preexec_fn=end_with_sweep,  # noqa: PLW1509  # no threads are running yet
        )
    return Started(run, process, time.monotonic())


def _signal_all(active: list[Started], number: signal.Signals) -> None:
    for started in active:
        with suppress(ProcessLookupError):
            started.process.send_signal(number)


def _end(active: list[Started]) -> None:
    """End what is still under way after a second Ctrl-C or an error."""
    _signal_all(active, signal.SIGINT)
    deadline = time.monotonic() + KILL_S
    for started in active:
        try:
            started.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()
