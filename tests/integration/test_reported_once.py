"""Errors of a user's code are reported once in a run, however many workers meet them."""

import logging
import sys
from io import StringIO

import pytest
import ray

from rlinf_vl.rewards.processes import Limits, ProcessPool
from rlinf_vl.rewards.result import Answer
from rlinf_vl.rollout.episode.faults import FaultLog
from rlinf_vl.runtime.ray_process import first_report
from rlinf_vl.types import Problem

pytestmark = pytest.mark.integration
ENVIRONMENT = "def step(response):\n    raise KeyError(response)\n"
REWARD = "def broken(response, answer):\n    raise ZeroDivisionError('no answers')\n"


class Worker:
    """A process that meets the errors of a user's environment and reward function."""

    def __init__(self, environment_file: str, reward_file: str) -> None:
        self.environment_file = environment_file
        self.reward_file = reward_file

    def reported_faults(self) -> list[str]:
        code: dict = {}
        exec(compile(ENVIRONMENT, self.environment_file, "exec"), code)
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logger = logging.getLogger("rlinf_vl.rollout.episode.faults")
        logger.addHandler(handler)
        faults = FaultLog(first_report)
        for response in ("left", "right"):
            try:
                code["step"](response)
            except KeyError as error:
                faults.add("problem", error)
        return messages

    def reported_tracebacks(self) -> str:
        stderr, sys.stderr = sys.stderr, StringIO()
        try:
            pool = ProcessPool(
                [(f"{self.reward_file}:broken", {})],
                {self.reward_file: REWARD},
                Limits(60.0, 4.0, 1),
                first_report,
            )
            answers = [Answer("1", "1"), Answer("2", "2")]
            futures = pool.submit(0, Problem("row", (), "1"), answers, images=False, together=False)
            for future in futures:
                assert isinstance(future.exception(timeout=120), Exception)
            pool.close()
            return sys.stderr.getvalue()
        finally:
            sys.stderr = stderr


@pytest.fixture
def workers(tmp_path):
    ray.init("local", num_cpus=2, include_dashboard=False, namespace="reported-once")
    environment_file, reward_file = str(tmp_path / "env.py"), str(tmp_path / "reward.py")
    (tmp_path / "reward.py").write_text(REWARD)
    yield [
        ray.remote(Worker).options(num_cpus=1).remote(environment_file, reward_file) for _ in "ab"
    ]
    ray.shutdown()


def test_two_workers_report_an_error_once(workers):
    faults = ray.get([worker.reported_faults.remote() for worker in workers])
    assert sum(map(len, faults)) == 1, faults
    tracebacks = ray.get([worker.reported_tracebacks.remote() for worker in workers])
    assert "".join(tracebacks).count("Traceback") == 1, tracebacks


def test_without_ray_each_process_reports():
    assert not ray.is_initialized()
    assert first_report("a") and first_report("a")
