"""The schedules of generation: `runner.schedule` names one.

With B = data.rollout_batch_size, s = runner.max_staleness, and engines that have the weights of the
step before:

| schedule | requested when a step begins to wait | requested when it has its groups |
|---|---|---|
| sync | B, of which it waits for all | – |
| one_step_off | B, less finished groups and groups in flight that are due | B, less finished groups |
| async | so many that (s + 1) · B are in flight or finished | so many that s · B are |

A further schedule is one class here, and its name in `SCHEDULES` and among those that the config
allows (`rlinf_vl.config.schema.runner.SCHEDULES_AHEAD`).
"""

from rlinf_vl.config.schema.runner import RunnerConfig
from rlinf_vl.controller.scheduler import RolloutScheduler


class Sync(RolloutScheduler):
    """Generation and training in turn: a step requests its groups, and trains on those."""

    @classmethod
    def is_reproducible(cls, runner: RunnerConfig) -> bool:
        return True

    def n_requests_before(self, step: int) -> int:
        return self.batch_size - len(self.buffer.groups)

    def n_requests_after(self, step: int) -> int:
        return 0

    def needs_more(self) -> bool:
        # Which groups are trained must not depend on which of them finish first.
        return True


class OneStepOff(RolloutScheduler):
    """Generation of the next step's groups while this step trains, from the weights before it."""

    waits_before_sync = True

    @classmethod
    def is_reproducible(cls, runner: RunnerConfig) -> bool:
        # Above 1 a step takes the groups that have finished first.
        return runner.max_staleness == 1

    def n_requests_before(self, step: int) -> int:
        n_expected = self.buffer.n_finished + self.n_in_flight_due(step)
        return min(self.capacity(step), self.batch_size - n_expected)

    def n_requests_after(self, step: int) -> int:
        return min(self.capacity(step, selected=1), self.batch_size - self.buffer.n_finished)

    def is_ready_to_sync(self, version: int) -> bool:
        # Each group that the next step must train on is to be from one version.
        return not self.n_in_flight_due(version + 1)


class Async(RolloutScheduler):
    """Generation all the time, as far ahead as the bound allows; weights arrive between two
    tokens."""

    def n_requests_before(self, step: int) -> int:
        return self.capacity(step)

    def n_requests_after(self, step: int) -> int:
        return self.capacity(step, selected=1)


SCHEDULES: dict[str, type[RolloutScheduler]] = {
    "sync": Sync,
    "one_step_off": OneStepOff,
    "async": Async,
}
