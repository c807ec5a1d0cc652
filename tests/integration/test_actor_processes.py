"""What an actor's process sees of its host, with pretended GPUs; and members of a weight group that die, hang or take too long."""

import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import ray

from rlinf_vl.actor import group
from rlinf_vl.config.schema import ClusterConfig
from rlinf_vl.controller.weight_sync import WeightSync
from rlinf_vl.rollout.pool.updates import WeightUpdate
from rlinf_vl.runtime.launch import _actor_environment
from rlinf_vl.runtime.ray_process import ActorsLost, own_process, where

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def pretended_gpus():
    """A private Ray that offers 8 GPUs, and is told not to show each actor its own."""
    environment = _actor_environment(ClusterConfig()) | {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"
    }
    with pytest.MonkeyPatch.context() as m:
        for name, value in environment.items():
            m.setenv(name, value)
        m.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.init("local", num_cpus=8, num_gpus=8, include_dashboard=False)
        yield
        ray.shutdown()


@ray.remote(num_cpus=0, concurrency_groups={"health": 1})
class Member:
    """As much of a rank or a worker as is watched."""

    @ray.method(concurrency_group="health")
    def process(self):
        return where()

    def finish(self):
        return True

    def fail(self):
        raise RuntimeError("connection closed by peer")

    def __init__(self, stops=False):
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)

    def sleep(self):
        time.sleep(600)

    def set_up(self):
        import torch

        own_process("cuda")
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
        return (
            {name: os.environ[name] for name in names},
            torch.get_num_threads(),
            len(os.sched_getaffinity(0)),
        )


def test_actors_see_their_own_gpus_only_even_if_ray_is_told_not_to_see_to_it():
    """Torch's device 0 and SGLang's base_gpu_id 0 would otherwise be the same GPU in every process."""
    pairs = [Member.options(num_gpus=1).remote() for _ in range(2)] + [
        Member.options(num_gpus=2).remote()
    ]
    rank, worker, engine_of_two = ray.get([member.set_up.remote() for member in pairs])
    (alone, threads, cores), (beside, *_), (two, *_) = rank, worker, engine_of_two
    seen = [names["CUDA_VISIBLE_DEVICES"].split(",") for names in (alone, beside, two)]
    assert [len(gpus) for gpus in seen] == [1, 1, 2]
    assert len({gpu for gpus in seen for gpu in gpus}) == 4
    assert threads == max(1, min(16, cores // 16)) == int(alone["OMP_NUM_THREADS"])
    nccl = [
        {name: value for name, value in names.items() if name.startswith("NCCL")}
        for names in (alone, beside)
    ]
    assert nccl[0] == nccl[1] == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture
def waiting():
    """(wait, members) of a `WeightSync` whose rank 0 and engine are two `Member`s."""
    members = [Member.remote(), Member.remote()]
    ray.get([member.process.remote() for member in members])
    sync = object.__new__(WeightSync)
    sync._actors = SimpleNamespace(ranks=members[:1], heartbeat_timeout=2.0)
    receivers = [(SimpleNamespace(number=0), SimpleNamespace(actor=members[1]))]
    yield partial(sync._wait, update=WeightUpdate(receivers, base=None)), members
    for member in members:
        ray.kill(member)


def test_members_that_finish_are_waited_for(waiting):
    wait, members = waiting
    wait("a test", [member.finish.remote() for member in members], 60)


def test_a_member_that_dies_ends_the_wait(waiting):
    wait, (rank, worker) = waiting
    calls = [rank.sleep.remote(), worker.sleep.remote()]
    _, pid = ray.get(worker.process.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorsLost, match="joining: rollout worker 0 died"):
        wait("joining", calls, 600)


def test_a_failure_that_comes_from_a_death_is_told_as_one(waiting):
    wait, (rank, worker) = waiting
    _, pid = ray.get(worker.process.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorsLost, match="a broadcast: rollout worker 0 died"):
        wait("a broadcast", [rank.fail.remote()], 600)


def test_a_member_that_is_stopped_ends_the_wait(waiting):
    wait, (rank, worker) = waiting
    calls = [rank.sleep.remote(), worker.sleep.remote()]
    _, pid = ray.get(worker.process.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ActorsLost, match="joining: rollout worker 0: no heartbeat"):
            wait("joining", calls, 600)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_wait_has_an_end(waiting):
    """A group whose other members never come: all live, nothing happens."""
    wait, (rank, _) = waiting
    with pytest.raises(ActorsLost, match="joining: not done within 3 s"):
        wait("joining", [rank.sleep.remote()], 3)


def test_a_rank_that_is_stopped_before_it_begins_is_lost(monkeypatch):
    """It answers no heartbeat yet, and its call would never end."""
    monkeypatch.setattr(group, "IMPORT_TIMEOUT_S", 8.0)
    members = [Member.remote(), Member.remote(stops=True)]
    learner = object.__new__(group.ActorGroup)
    learner.ranks, learner.heartbeat_timeout = members, 60.0
    learner._processes = [member.process.remote() for member in members]
    ray.get(learner._processes[0])  # on a busy machine the sound one takes longer than the limit
    try:
        with pytest.raises(ActorsLost, match="actor rank 1: it did not begin within 8 s"):
            learner.start(1)
        assert learner.placed(lambda: True) is False
    finally:
        for member in members:
            ray.kill(member)
