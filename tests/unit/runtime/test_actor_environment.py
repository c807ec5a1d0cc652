"""Variables that every actor's process is started with."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest
import ray

from rlinf_vl.config.engines import may_broadcast
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.schema import ClusterConfig
from rlinf_vl.runtime import launch
from rlinf_vl.runtime.launch import MALLOC, _actor_environment
from rlinf_vl.runtime.ray_process import own_process, threads_beside


def test_nccl_is_set_alike_for_ranks_and_engines(monkeypatch):
    """SGLang turns cuMem and NVLS off in its own processes; one broadcast group must not mix both settings."""
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    found = _actor_environment(ClusterConfig())
    assert (found["NCCL_CUMEM_ENABLE"], found["NCCL_NVLS_ENABLE"]) == ("0", "0")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert _actor_environment(ClusterConfig())["NCCL_CUMEM_ENABLE"] == "1"


def test_ranks_keep_nccls_own_choice_where_no_group_has_both():
    """NVLink's own reductions are off only where rank 0 broadcasts to SGLang's processes."""
    assert not any(name.startswith("NCCL") for name in _actor_environment(ClusterConfig(), False))


@pytest.mark.parametrize(
    ("overrides", "broadcasts"),
    [
        ([], False),
        (["cluster.component_placement={actor: 0-3, rollout: 4-7}"], True),
        (["cluster.component_placement=disaggregated", "rollout.weight_sync=delta"], False),
        (["cluster.component_placement=disaggregated", "rollout.weight_sync=broadcast"], True),
    ],
)
def test_a_broadcast_is_known_from_strategy_and_placement(overrides, broadcasts):
    assert may_broadcast(parse_config("qwen3-vl-2b-grpo-fsdp-geo3k", overrides)) == broadcasts


@pytest.mark.parametrize(
    ("node", "set_before", "interface"),
    [
        ("10.1.2.3", None, "eth1"),
        ("10.1.2.3", "ib0", "ib0"),
        ("127.0.0.1", None, None),
        ("10.9.9.9", None, None),
    ],
)
def test_gloo_takes_the_interface_of_the_nodes_address(monkeypatch, node, set_before, interface):
    """Also where Ray was not started by `start_ray.sh`; by itself gloo looks up the host's name."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    if set_before:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_before)

    def addresses(*of):
        return [SimpleNamespace(family=socket.AF_INET, address=address) for address in of]

    host = {
        "lo": addresses("127.0.0.1"),
        "eth0": addresses("10.0.0.7"),
        "eth1": addresses("10.1.2.3"),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: host)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    own_process("cpu")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_threads():
    assert _actor_environment(ClusterConfig())["OMP_NUM_THREADS"] == "1"
    assert [threads_beside(*host) for host in ((26, 1), (208, 8), (96, 8), (4, 8), (512, 1))] == [
        13,
        13,
        6,
        1,
        16,
    ]


@pytest.mark.parametrize(
    ("device", "files", "visible", "set_malloc"),
    [
        ("cpu", ["nvidia0"], None, True),
        ("cuda", [], None, False),
        ("auto", [], None, True),
        ("auto", ["nvidia0"], None, False),
        ("auto", ["nvidiactl"], None, True),
        ("auto", ["nvidia0"], "", True),
    ],
)
def test_malloc_keeps_freed_memory_on_cpus_only(
    monkeypatch, tmp_path, device, files, visible, set_malloc
):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(launch, "GPU_FILES", (f"{tmp_path}/nvidia[0-9]*", f"{tmp_path}/kfd"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (
        MALLOC.items() <= _actor_environment(ClusterConfig(device=device)).items()
    ) is set_malloc
