"""Placement: which slots a component takes."""

import pytest

from rlinf_vl.config import placement_slots
from rlinf_vl.config.placement import shares_slots
from rlinf_vl.errors import ConfigError


@pytest.mark.parametrize(
    ("placement", "n_slots", "actor", "rollout"),
    [
        ({"actor,rollout": "all"}, 3, (0, 1, 2), (0, 1, 2)),
        ({"rollout , actor": "0-1"}, None, (0, 1), (0, 1)),
        ({"actor": "0-1", "rollout": 0}, 2, (0, 1), (0,)),
        ({"actor": "0-1,4", "rollout": "2, 3"}, 5, (0, 1, 4), (2, 3)),
        ({"actor": "3,0", "rollout": "all"}, 4, (0, 3), (0, 1, 2, 3)),
        ({"actor,rollout": None, "actor": 0, "rollout": 1}, None, (0,), (1,)),
    ],
)
def test_slots(placement, n_slots, actor, rollout):
    assert placement_slots(placement, n_slots) == {"actor": actor, "rollout": rollout}
    assert shares_slots(placement) == bool(set(actor) & set(rollout)), "the engines' memory saver hangs on it"


@pytest.mark.parametrize(
    ("placement", "n_slots", "expected"),
    [
        ({"actor,rollout": "all"}, None, "'actor: all' needs the number of slots"),
        ({"actor,rollout": "all"}, 0, "the cluster has none"),
        ({"actor": "0-1", "rollout": 0}, 0, "the cluster has none of cluster.device; set that to cpu"),
        ({"actor": 0, "rolout": 1}, 2, "unknown component 'rolout'; components are actor and rollout; did you mean"),
        ({"actor": 0}, 2, "no place for 'rollout'"),
        ({"actor,rollout": "all", "actor": 0}, 2, "'actor' is placed twice, by 'actor,rollout' and by 'actor'"),
        ({"actor,rollout": "0-2"}, 2, "'actor' wants slot 2, but the cluster has 2, numbered 0 to 1"),
        ({"actor,rollout": "3-0"}, None, "'actor,rollout: 3-0' isn't all, a slot, or ranges"),
        ({"actor,rollout": "some"}, None, "isn't all, a slot, or ranges"),
        ({"actor,rollout": -1}, None, "isn't all, a slot, or ranges"),
        ({"actor,rollout": ""}, None, "isn't all, a slot, or ranges"),
        ({"actor,rollout": "0-2,1"}, None, "names a slot twice"),
    ],
)
def test_refusals(placement, n_slots, expected):
    with pytest.raises(ConfigError, match=r"^cluster\.component_placement: ") as error:
        placement_slots(placement, n_slots)
    assert expected in str(error.value)
