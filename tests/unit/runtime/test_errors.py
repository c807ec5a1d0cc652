"""What is shown of an error: its own message, not the way it came."""

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from rlinf_vl.errors import ConfigError, RunError, reason_of

TRACEBACK = """\x1b[36mray::RolloutRank.__init__()\x1b[39m (pid=1, ip=127.0.0.1)
  File "worker.py", line 86, in __init__
    self.engine = make_engine(config)
ValueError: no such engine
there are: torch, sglang"""


def from_task(cause: Exception) -> RayTaskError:
    return RayTaskError("f", TRACEBACK, cause, proctitle="ray::f", pid=1, ip="127.0.0.1")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError(), "AssertionError"),
        (RunError("it ends here; resume"), "it ends here; resume"),
        (ConfigError("a: 1", "b: 2"), "2 problems:\na: 1\nb: 2"),
        (from_task(ValueError("no such engine\nthere are: torch, sglang")), "ValueError: no such engine\nthere are: torch, sglang"),
        (from_task(RunError("the disk is full")), "the disk is full"),
        (from_task(ConfigError("a: 1")).as_instanceof_cause(), "a: 1"),
        (from_task(from_task(ValueError("deep"))), "ValueError: deep"),
        (ActorDiedError(from_task(ValueError("no such engine"))), "ValueError: no such engine\nthere are: torch, sglang"),
        (ActorDiedError(), "ActorDiedError: The actor died unexpectedly before finishing this task."),
    ],
)  # fmt: skip
def test_reason(error, shown):
    assert reason_of(error) == shown
