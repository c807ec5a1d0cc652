"""Which ranks share the weights, by the nodes they run on."""

import pytest

from rlinf_vl.actor.group import ranks_per_node
from rlinf_vl.errors import RunError


@pytest.mark.parametrize(("nodes", "expected"), [("aaaa", 4), ("aabb", 2), ("abc", 1)])
def test_neighbours_on_a_node_share_the_weights(nodes, expected):
    assert ranks_per_node(list(nodes)) == expected


@pytest.mark.parametrize("nodes", ["aab", "abab", "abba"])
def test_nodes_that_do_not_come_out_even_are_refused(nodes):
    with pytest.raises(
        RunError, match=r"actor\.fsdp_config\.strategy: hsdp needs equally many .* Set fsdp2"
    ):
        ranks_per_node(list(nodes))
