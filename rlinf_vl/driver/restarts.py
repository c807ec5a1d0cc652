"""Ranks that were lost are started again: how often, from which checkpoint, and on which nodes."""

import time
from collections import Counter
from functools import partial

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.errors import RunError
from rlinf_vl.runtime.checkpoints import Folder, newest_checkpoint, set_damaged_aside
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.lost_placements import NODE_LOSS_HINT, find_lost
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

#: Seconds between two looks at whether a lost node is back.
POLL_S = 2.0
#: Most restarts of the ranks from one checkpoint.
MAX_RESTARTS = 3


class TooManyRestarts(RunError):
    """The actor ranks died more than `MAX_RESTARTS` times without a checkpoint in between."""


class Restarts:
    """Counts how often a run's ranks are started again, by the checkpoint that they load."""

    def __init__(self, home: Folder, start: Folder | None, log: RunLog) -> None:
        """
        Args:
            home: where checkpoints are written.
            start: the checkpoint that the run was resumed from; None: it was not.
        """
        self._home, self._start, self._log = home, start, log
        self._times = Counter[Folder | None]()

    def count(self, lost: ActorsLost) -> None:
        """Set damaged checkpoints aside, and record that the ranks start again from the newest.

        Raises:
            TooManyRestarts: they have done so `MAX_RESTARTS` times from this checkpoint.
        """
        # A damaged checkpoint would fail every restart.
        set_damaged_aside(self._home, partial(self._log.event, "checkpoint_damaged"))
        checkpoint = newest_checkpoint(self._home, self._start)
        if self._times[checkpoint] >= MAX_RESTARTS:
            raise TooManyRestarts(
                f"{lost}. The actor ranks were started again {MAX_RESTARTS} times before "
                "without a further checkpoint; the last complete one is "
                f"{checkpoint or 'none'}. Mend the cause and resume with runner.resume_dir=auto"
            ) from lost
        self._times[checkpoint] += 1
        resumed = f"the run goes back to {checkpoint or 'its start: it has no checkpoint yet'}"
        self._log.event("actors_restarted", f"{lost}; the actor ranks start again, {resumed}")


def ranks_again(
    config: Config, model_path: str, reservation: Reservation, log: RunLog, stop: StopRequest
) -> ActorGroup:
    """Start all ranks. If a node is lost, wait for it or start fewer, as
    `cluster.on_node_loss` says; raises `Interrupted` if the run is asked to stop meanwhile."""
    placements, reported = reservation.actor, False
    while True:
        lost = find_lost(placements)
        surviving = [options for number, options in enumerate(placements) if number not in lost]
        # Ranks share sequences and experts in groups: an incomplete group is of no use.
        surviving = surviving[: len(surviving) - len(surviving) % config.actor.rank_multiple]
        if not lost or (surviving and config.cluster.on_node_loss == "shrink"):
            if lost:
                message = f"the nodes of {len(lost)} of {len(placements)} actor ranks are lost; {len(surviving)} go on"
                log.event("run_shrunk", message)
            learner = ActorGroup(config, model_path, reservation.device, surviving)
            try:
                # A node may be lost while the ranks start: then look again.
                if learner.placed(lambda: bool(stop.check() or find_lost(surviving))):  # noqa: B023
                    return learner
            except (Interrupted, ActorsLost):
                learner.kill()
                raise
            learner.kill()
        elif not reported:
            reported = True
            message = f"the nodes of {len(lost)} of {len(placements)} actor ranks are lost; the run waits: {NODE_LOSS_HINT}"
            log.event("node_lost", message)
        stop.check()
        time.sleep(POLL_S)
