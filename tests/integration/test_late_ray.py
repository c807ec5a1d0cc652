"""A private Ray whose raylet does not register in time, as on a busy machine: real Ray, whose first answer is kept back."""

import psutil
import pytest
import ray

from rlinf_vl.config import load_config
from rlinf_vl.runtime import launch
from rlinf_vl.runtime.launch import ray_cluster

pytestmark = pytest.mark.integration


def test_ray_that_starts_late_is_started_again_and_leaves_nothing(monkeypatch, caplog):
    get_node = launch.services.get_node
    children_before = set(psutil.Process().children(recursive=True))  # of other tests
    late_processes = []

    def late(*arguments):
        if not late_processes:
            late_processes.extend(set(psutil.Process().children(recursive=True)) - children_before)
            raise Exception(f"The current node {launch.STARTED_LATE}.")
        return get_node(*arguments)

    monkeypatch.setattr(launch.services, "get_node", late)
    with ray_cluster(load_config("toy-grpo-cpu")):
        assert ray.cluster_resources()["CPU"] >= 2
        names = {process.name() for process in psutil.Process().children(recursive=True)}
        assert {"gcs_server", "raylet"} <= names
        assert late_processes and not any(process.is_running() for process in late_processes)
    assert "it is started again" in caplog.text


def test_ray_that_is_always_late_ends_with_its_own_error(monkeypatch):
    def late(*_):
        raise Exception(f"The current node {launch.STARTED_LATE}.")

    before = set(psutil.Process().children())
    monkeypatch.setattr(launch.services, "get_node", late)
    monkeypatch.setattr(launch, "START_ATTEMPTS", 2)
    with (
        pytest.raises(Exception, match=launch.STARTED_LATE),
        ray_cluster(load_config("toy-grpo-cpu")),
    ):
        pass
    assert set(psutil.Process().children()) <= before
