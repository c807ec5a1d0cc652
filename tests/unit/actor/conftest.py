"""One FSDP2 rank over gloo, in this process."""

import pytest
import torch.distributed as dist

from rlinf_vl.actor.mesh import Mesh, join_ranks


@pytest.fixture(scope="module")
def mesh():
    join_ranks("cpu")
    yield Mesh.make("cpu")
    dist.destroy_process_group()
