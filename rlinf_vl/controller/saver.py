"""Checkpoints of a run, written while it trains on (`runner.async_save`).

`Saver.save` lets the ranks copy their state to host memory; a thread then lets them write it, and
gives the checkpoint its name. One checkpoint is written at a time: the next one waits. Whatever
dies meanwhile, the checkpoint before is complete.
"""

import logging
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from rlinf_vl.config.schema import RunnerConfig
from rlinf_vl.controller.protocols import Learner
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.runtime.checkpoints import (
    CheckpointFailed,
    Folder,
    newest_checkpoint,
    save_checkpoint,
)

logger = logging.getLogger(__name__)


class Saver:
    """The writer of one learner's checkpoints; `close` it whatever happens.

    Attributes:
        newest: the newest complete checkpoint; without one, the checkpoint that the run started
            from.
    """

    newest: Folder | None

    def __init__(
        self,
        runner: RunnerConfig,
        home: Folder,
        learner: Learner,
        log: RunLog,
        start: Folder | None,
    ) -> None:
        self.newest = newest_checkpoint(home, start)
        self._runner = runner
        self._home = home
        self._learner = learner
        self._log = log
        self._writing: Future[tuple[Folder, float]] | None = None

    def save(self, state: Mapping[str, Any], *, last: bool) -> None:
        """Write a checkpoint with `state`, a `RunState.content`. If that fails, training goes on
        without it; only the `last` one of a run must not fail, and is waited for."""
        runner = self._runner
        with self._log.timed("checkpoint"):
            self.collect(wait=True)
            try:
                # A run that is resumed from this checkpoint must have the lines of all its steps.
                self._log.flush()
                self._learner.stage()
            except OSError as error:
                self._failed(error, last)
                return
            write = partial(
                save_checkpoint,
                self._home,
                state["step"],
                self._learner.write,
                state,
                runner.keep_last,
                runner.keep_best,
                state["accuracies"],
            )
            self._writing = Future()
            # A daemon, as `close` does not wait for it if the process is to end at once.
            threading.Thread(
                target=_run, args=(write, self._writing), name="checkpoint", daemon=True
            ).start()
            if last or not runner.async_save:
                self.collect(wait=True, last=last)

    def collect(self, *, wait: bool = False, last: bool = False) -> None:
        """Record the outcome of the last `save`, if it has ended, or `wait` for it."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        writing, self._writing = self._writing, None
        try:
            self.newest, seconds = writing.result()
        except (CheckpointFailed, OSError) as error:
            self._failed(error, last)
        else:
            self._log.timings["time/checkpoint_write"] = seconds
            logger.info("saved %s in %.1f s", self.newest, seconds)

    def _failed(self, error: Exception, last: bool) -> None:
        self._log.event("checkpoint_failed", str(error))
        if last:
            raise error

    def close(self) -> None:
        """Wait for the checkpoint that is being written, unless the process is to end at once
        (`KeyboardInterrupt`). A lost learner ends the writing."""
        if self._writing is not None and not isinstance(
            sys.exception(), KeyboardInterrupt | SystemExit
        ):
            wait([self._writing])


def _run(write: partial[Folder], done: Future[tuple[Folder, float]]) -> None:
    """Call `write`, and put the folder that it returns and its seconds, or its error, into
    `done`."""
    start = time.perf_counter()
    try:
        done.set_result((write(), time.perf_counter() - start))
    except BaseException as error:
        done.set_exception(error)
