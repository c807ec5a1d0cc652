"""Which cluster is refused; who gets a signal."""

import os
import socket

import pytest
from ray._private import services

from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.launch import _own_sessions, ray_cluster


@pytest.mark.parametrize(
    ("override", "environment", "named"),
    [
        (
            "cluster.ray_address=auto",
            {"RAY_ADDRESS": "127.0.0.1:PORT"},
            "the environment variable RAY_ADDRESS: nothing",
        ),
        ("cluster.ray_address=127.0.0.1:PORT", {}, r"^cluster\.ray_address: nothing"),
        ("cluster.ray_address=auto", {"RAY_ADDRESS": "ray://127.0.0.1:PORT"}, "RAY_ADDRESS"),
        ("cluster.ray_address=auto", {"RAY_ADDRESS": "nonsense"}, "RAY_ADDRESS"),
    ],
)
def test_a_cluster_that_is_gone_is_refused_at_once_by_the_name_of_its_setting(
    override, environment, named, monkeypatch
):
    with socket.socket() as silent:  # its port is taken, and nothing listens there
        silent.bind(("127.0.0.1", 0))
        port = str(silent.getsockname()[1])
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("PORT", port))
        config = load_config("toy-grpo-cpu", [override.replace("PORT", port)])
        with pytest.raises(ConfigError, match=named), ray_cluster(config):
            raise AssertionError("it joined nothing")


def test_the_processes_of_a_private_cluster_are_out_of_reach_of_signals_for_our_group():
    with _own_sessions():
        process = services.ConsolePopen(["sleep", "60"])
    try:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
    finally:
        process.kill()
        process.wait()
    # As it was.
    assert services.ConsolePopen is not None and isinstance(services.ConsolePopen, type)
