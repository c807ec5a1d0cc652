"""A process alone in its weight group: it can leave it, in either way, and join the next one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlinf_vl.transport.rendezvous import listen
from rlinf_vl.weights.process_group import WeightGroup, join, leave


@pytest.fixture
def default_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_that_was_left_leaves_nothing_behind(default_group, monkeypatch, backend):
    """With `nccl` the way out is another: an abort, that waits for nobody."""
    for number in range(2):
        store, (host, port) = listen("127.0.0.1")
        group = join(WeightGroup(host, port, f"weights-{number}", "gloo", 1, 0), store)
        dist.broadcast(torch.ones(3), src=0, group=group)
        with monkeypatch.context() as m:
            m.setattr(dist, "get_backend", lambda _: backend)
            leave(group)
        assert len(c10d._world.pg_map) == 1  # the default one
