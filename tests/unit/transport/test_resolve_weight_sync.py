"""`rollout.weight_sync: auto` follows the placement; what can't work on a GPU is refused; former names are accepted."""

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.transport.strategies import resolve_weight_sync


@pytest.mark.parametrize(
    ("device", "collocated", "beside_actors", "expected"),
    [
        ("cpu", True, True, "shared_memory"),
        ("cpu", False, False, "delta"),
        ("cuda", True, True, "shared_memory"),
        ("cuda", False, False, "broadcast"),
        ("cuda", True, False, "delta"),  # {actor: 0-3, rollout: 0-7}
    ],
)
def test_auto(device, collocated, beside_actors, expected):
    assert resolve_weight_sync("auto", device, collocated, beside_actors) == expected


def test_what_can_not_work_is_refused():
    with pytest.raises(
        ValueError, match="broadcast does not go with this cluster.component_placement: NCCL"
    ):
        resolve_weight_sync("broadcast", "cuda", collocated=True, beside_actors=True)
    with pytest.raises(
        ValueError,
        match="shared_memory does not go with this cluster.component_placement: CUDA IPC",
    ):
        resolve_weight_sync("shared_memory", "cuda", collocated=True, beside_actors=False)
    for strategy in ("delta", "object_store", "broadcast", "shared_memory"):
        assert resolve_weight_sync(strategy, "cpu", collocated=True, beside_actors=True) == strategy


@pytest.mark.parametrize(("former", "name"), [("nccl", "broadcast"), ("cuda_ipc", "shared_memory")])
def test_former_names_are_accepted(former, name):
    assert (
        load_config("toy-grpo-cpu", [f"rollout.weight_sync={former}"]).rollout.weight_sync == name
    )
