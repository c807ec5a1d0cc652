"""`rollout.weight_sync: auto` follows the placement; what can't work on a GPU is refused; former names are accepted."""

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.weights import STRATEGIES
from rlinf_vl.weights.strategy import Site, choose_strategy, strategy_named


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
    assert choose_strategy("auto", Site(device, collocated, beside_actors)).name == expected


def test_what_can_not_work_is_refused():
    with pytest.raises(
        ValueError, match="broadcast does not go with this cluster.component_placement: NCCL"
    ):
        choose_strategy("broadcast", Site("cuda", collocated=True, beside_actors=True))
    with pytest.raises(
        ValueError,
        match="shared_memory does not go with this cluster.component_placement: CUDA IPC",
    ):
        choose_strategy("shared_memory", Site("cuda", collocated=True, beside_actors=False))
    for name in STRATEGIES:
        assert choose_strategy(name, Site("cpu", collocated=True, beside_actors=True)).name == name


def test_each_strategy_has_the_name_under_which_it_is_listed():
    assert {name: strategy_named(name).name for name in STRATEGIES} == {n: n for n in STRATEGIES}


@pytest.mark.parametrize(("former", "name"), [("nccl", "broadcast"), ("cuda_ipc", "shared_memory")])
def test_former_names_are_accepted(former, name):
    assert (
        load_config("toy-grpo-cpu", [f"rollout.weight_sync={former}"]).rollout.weight_sync == name
    )
