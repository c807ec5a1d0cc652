"""Placement: which slots a component takes."""

import pytest

from rlinf_vl.config.placement import Placement, placement_of, shares_slots
from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError


def placed_on(n_slots, placement):
    config = Config()
    config.cluster.component_placement = placement
    return placement_of(config, n_slots)


@pytest.mark.parametrize(
    ("placement", "n_slots", "actor", "rollout"),
    [
        ({"actor,rollout": "all"}, 3, (0, 1, 2), (0, 1, 2)),
        ({"rollout , actor": "0-1"}, 2, (0, 1), (0, 1)),
        ({"actor": "0-1", "rollout": 0}, 2, (0, 1), (0,)),
        ({"actor": "0-1,4", "rollout": "2, 3"}, 5, (0, 1, 4), (2, 3)),
        ({"actor": "3,0", "rollout": "all"}, 4, (0, 3), (0, 1, 2, 3)),
        ({"actor,rollout": None, "actor": 0, "rollout": 1}, 2, (0,), (1,)),
    ],
)
def test_slots(placement, n_slots, actor, rollout):
    placed = placed_on(n_slots, placement)
    assert (placed.actor, placed.rollout) == (actor, rollout)
    assert shares_slots(placement) == placed.shared == bool(set(actor) & set(rollout)), (
        "the engines' memory saver hangs on it"
    )
    assert placed.beside_actors == (set(rollout) <= set(actor))


@pytest.mark.parametrize(
    ("placement", "n_slots", "expected"),
    [
        ({"actor,rollout": "all"}, 0, "the cluster has none"),
        ({"actor": "0-1", "rollout": 0}, 0, "the cluster has none of cluster.device; set that to cpu"),
        ({"actor": 0, "rolout": 1}, 2, "unknown component 'rolout'; components are actor and rollout; did you mean"),
        ({"actor": 0}, 2, "no place for 'rollout'"),
        ({"actor,rollout": "all", "actor": 0}, 2, "'actor' is placed twice, by 'actor,rollout' and by 'actor'"),
        ({"actor,rollout": "0-2"}, 2, "'actor' wants slot 2, but the cluster has 2, numbered 0 to 1"),
        ({"actor,rollout": "3-0"}, 9, "'actor,rollout: 3-0' isn't all, a slot, or ranges"),
        ({"actor,rollout": "some"}, 9, "isn't all, a slot, or ranges"),
        ({"actor,rollout": -1}, 9, "isn't all, a slot, or ranges"),
        ({"actor,rollout": ""}, 9, "isn't all, a slot, or ranges"),
        ({"actor,rollout": "0-2,1"}, 9, "names a slot twice"),
    ],
)
def test_refusals(placement, n_slots, expected):
    with pytest.raises(ConfigError, match=r"^cluster\.component_placement: ") as error:
        placed_on(n_slots, placement)
    assert expected in str(error.value)


def test_engines_of_several_slots():
    assert Placement((0, 1, 2), (0, 1, 2)).engines == [(0,), (1,), (2,)]
    assert Placement((0,), (4, 5, 6, 7), 2).engines == [(4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("actor", "rollout", "expected"),
    [((0, 1), (0, 1), "2 needs slots of its own"), ((3,), (0, 1, 2), "2 does not divide the 3 slots of rollout")],
)
def test_engines_that_can_not_be_placed(actor, rollout, expected):
    with pytest.raises(ConfigError, match=expected):
        Placement(actor, rollout, 2)


def test_ranks_that_share_rows_come_out_even():
    assert Placement((0, 1, 2, 3), (0,), context_parallel_size=2).actor == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"actor\.context_parallel_size: 2 does not divide the 3 slots of actor"):
        Placement((0, 1, 2), (0,), context_parallel_size=2)
