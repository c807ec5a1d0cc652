"""A row whose environment takes the worker's process with it: real workers die, and the row alone is quarantined."""

import pytest
from summaries import values

from rlinf_vl.config import load_config
from rlinf_vl.data.dataset import open_datasets
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.rollout.submission import Task

pytestmark = pytest.mark.integration

POISON = """
import os
from rlinf_vl.envs.single_turn import SingleTurn

class Poison(SingleTurn):
    def start(self, problem):
        self.poisoned = problem.id == "ROW"
        return super().start(problem)

    def step(self, response):
        if self.poisoned:
            os._exit(1)  # as a fault in native code does
        return super().step(response)
"""


def test_a_row_that_kills_its_workers_is_quarantined_and_the_others_are_answered(
    toy_folder, tmp_path, monkeypatch
):
    from rlinf_vl.rollout.pool import quarantine
    from rlinf_vl.rollout.pool.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    monkeypatch.setattr(quarantine, "MAX_ROW_DEATHS", 2)
    rows = open_datasets(load_config("toy-grpo-cpu", []).data, ENVIRONMENTS)["train"]
    (tmp_path / "poison.py").write_text(POISON.replace("ROW", rows.row_id(2)))
    overrides = [
        "cluster.component_placement={actor: 0, rollout: 0}",
        f"rollout.env_class={tmp_path}/poison.py:Poison",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    with ray_cluster(config), reserve(config) as placement:
        pool = RolloutPool(config, str(toy_folder), placement)
        pool.start()
        tasks = [Task(f"g{i}", "train", i, (2 * i, 2 * i + 1)) for i in range(4)]
        summaries = [summary for summary, _ in pool.submit(tasks).results()]
        again = [summary for summary, _ in pool.submit(tasks).results()]
        restarts = pool.restarts
        pool.stop()
    assert restarts == 2
    for found in (summaries, again):
        assert [any(values(summary, "error")) for summary in found] == [False, False, True, False]
        assert all(
            error.startswith("quarantined: 2 workers died while they answered it")
            for error in values(found[2], "error")
        )
