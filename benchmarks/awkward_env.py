"""The toy's question as an environment that is awkward to run: `benchmarks/chaos.py --hard` plays it.

Workers take `SLOW_START_S` to be made, and `UNCLOSED_SHARE` of the environments never return from `close()`.
"""

import random
import threading
import time

import psutil

from rlinf_vl.envs.single_turn import SingleTurn

SLOW_START_S = 30.0
UNCLOSED_SHARE = 0.03

# A rollout worker loads this file in its constructor, the controller and other processes do too.
if psutil.Process().cmdline()[0].startswith("ray::RolloutRank"):
    time.sleep(SLOW_START_S)


class AwkwardEnv(SingleTurn):
    """One question, one response; which environments never close depends on the seed alone."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        self._never_closes = random.Random(seed).random() < UNCLOSED_SHARE

    def close(self) -> None:
        super().close()
        if self._never_closes:
            threading.Event().wait()
