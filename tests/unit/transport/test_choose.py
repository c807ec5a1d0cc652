"""`rollout.weight_sync: auto` follows the placement; what can't work on a GPU is refused."""

import pytest

from rlinf_vl.transport import choose


@pytest.mark.parametrize(
    ("device", "collocated", "beside_actors", "expected"),
    [
        ("cpu", True, True, "cuda_ipc"),
        ("cpu", False, False, "object_store"),
        ("cuda", True, True, "cuda_ipc"),
        ("cuda", False, False, "nccl"),
        ("cuda", True, False, "object_store"),  # {actor: 0-3, rollout: 0-7}
    ],
)
def test_auto(device, collocated, beside_actors, expected):
    assert choose("auto", device, collocated, beside_actors) == expected


def test_what_can_not_work_is_refused():
    with pytest.raises(ValueError, match="nccl does not go with this cluster.component_placement"):
        choose("nccl", "cuda", collocated=True, beside_actors=True)
    with pytest.raises(ValueError, match="cuda_ipc does not go with this cluster.component_placement"):
        choose("cuda_ipc", "cuda", collocated=True, beside_actors=False)
    for way in ("object_store", "nccl", "cuda_ipc"):
        assert choose(way, "cpu", collocated=True, beside_actors=True) == way
