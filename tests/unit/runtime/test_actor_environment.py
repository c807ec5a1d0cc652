"""Variables that every actor's process is started with."""

from rlinf_vl.config.schema import ClusterConfig
from rlinf_vl.runtime.launch import _actor_environment
from rlinf_vl.runtime.ray_process import threads_beside


def test_nccl_is_set_alike_for_ranks_and_engines(monkeypatch):
    """SGLang turns cuMem and NVLS off in its own processes; one broadcast group must not mix both settings."""
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    found = _actor_environment(ClusterConfig())
    assert (found["NCCL_CUMEM_ENABLE"], found["NCCL_NVLS_ENABLE"]) == ("0", "0")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert _actor_environment(ClusterConfig())["NCCL_CUMEM_ENABLE"] == "1"


def test_threads():
    assert _actor_environment(ClusterConfig())["OMP_NUM_THREADS"] == "1"
    assert _actor_environment(ClusterConfig(cpu_threads=3))["OMP_NUM_THREADS"] == "3"
    assert [threads_beside(*host) for host in ((26, 1), (208, 8), (96, 8), (4, 8), (512, 1))] == [13, 13, 6, 1, 16]
