"""Placement: which slots a component takes, and on which nodes."""

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.config.placement import check_placement, placement_of, shares_slots, slots_named
from rlinf_vl.config.schema import Config


def asking(placement, tp=1, context=1, **cluster):
    config = Config()
    config.rollout.rollout_backend = "sglang"
    config.cluster.component_placement = (
        {"actor,rollout": placement} if isinstance(placement, str) else placement
    )
    config.rollout.tensor_parallel_size, config.actor.context_parallel_size = tp, context
    for key, value in cluster.items():
        setattr(config.cluster, key, value)
    return config


def placed_on(nodes, placement, tp=1, context=1):
    nodes = (nodes,) if isinstance(nodes, int) else nodes
    return placement_of(asking(placement, tp, context), nodes)


@pytest.mark.parametrize(
    ("placement", "n_slots", "actor", "rollout"),
    [
        ({"actor,rollout": "all"}, 3, (0, 1, 2), (0, 1, 2)),
        ({"rollout , actor": "0-1"}, 2, (0, 1), (0, 1)),
        ({"actor": "0-1", "rollout": 0}, 2, (0, 1), (0,)),
        ({"actor": "0-1,4", "rollout": "2, 3"}, 5, (0, 1, 4), (2, 3)),
        ({"actor": "3,0", "rollout": "all"}, 4, (0, 3), (0, 1, 2, 3)),
        ({"actor,rollout": None, "actor": 0, "rollout": 1}, 2, (0,), (1,)),
        ("collocated", 2, (0, 1), (0, 1)),
        ("disaggregated", 4, (0, 1), (2, 3)),
        ("single_node_split", 5, (0, 1), (2, 3, 4)),
        ({"actor": "node 0 slots 0,2", "rollout": "nodes 0 slots 1"}, 3, (0, 2), (1,)),
    ],
)
def test_slots(placement, n_slots, actor, rollout):
    placed = placed_on(n_slots, placement)
    assert (placed.actor, placed.rollout) == (actor, rollout)
    written = asking(placement).cluster.component_placement
    assert shares_slots(written) == placed.shared == bool(set(actor) & set(rollout))
    assert placed.beside_actors == (set(rollout) <= set(actor))


@pytest.mark.parametrize(
    ("placement", "nodes", "actor", "rollout"),
    [
        ("disaggregated", (2, 4), (0, 1), (2, 3, 4, 5)),
        ("disaggregated", (1, 1, 1), (0,), (1, 2)),
        ({"actor": "nodes 0-1", "rollout": "nodes 2"}, (2, 1, 3), (0, 1, 2), (3, 4, 5)),
        (
            {"actor": "nodes all slots 0-1", "rollout": "nodes all slots 2"},
            (3, 3),
            (0, 1, 3, 4),
            (2, 5),
        ),
        ({"actor": "nodes 0", "rollout": "nodes all"}, (2, 2), (0, 1), (0, 1, 2, 3)),
        ({"actor": "nodes 1,0", "rollout": "4-5"}, (2, 2, 2), (0, 1, 2, 3), (4, 5)),
    ],
)
def test_slots_by_node(placement, nodes, actor, rollout):
    placed = placed_on(nodes, placement)
    assert (placed.actor, placed.rollout) == (actor, rollout)
    assert shares_slots(asking(placement).cluster.component_placement) == placed.shared


@pytest.mark.parametrize(
    ("rollout", "nodes", "tp", "engines"),
    [
        ("4-7", 8, 2, [(4, 5), (6, 7)]),
        ("4,6,5,7", 8, 2, [(4, 5), (6, 7)]),
        ("nodes 1-2", (4, 4, 4), 2, [(4, 5), (6, 7), (8, 9), (10, 11)]),
        ("nodes all slots 2-3", (4, 4), 2, [(2, 3), (6, 7)]),
        ("4-7:0,8-11:1-2", 12, 1, [(4, 5, 6, 7), (8, 9), (10, 11)]),
        ("4-7:0,8,9", 12, 1, [(4, 5, 6, 7), (8,), (9,)]),
        ("nodes 1:0-1", (4, 4), 1, [(4, 5), (6, 7)]),
    ],
)
def test_engines_by_size(rollout, nodes, tp, engines):
    actor = "nodes all slots 0-1" if "all" in rollout else "0-3"
    assert list(placed_on(nodes, {"actor": actor, "rollout": rollout}, tp).engines) == engines


@pytest.mark.parametrize(
    ("tp", "context", "actor", "engines"), [(2, 2, 2, 2), (4, 1, 2, 1), (1, 3, 3, 3)]
)
def test_halves_come_out_even(tp, context, actor, engines):
    placed = placed_on(6, "single_node_split", tp, context)
    assert (len(placed.actor), len(placed.engines)) == (actor, engines)
    assert slots_named(asking("single_node_split", tp, context)) == tp + context


@pytest.mark.parametrize(
    ("placement", "nodes", "engines", "beside"),
    [
        ("all", (4,), [(0, 1), (2, 3)], True),
        ("all", (2, 2), [(0, 1), (2, 3)], True),
        ({"actor": "0-3", "rollout": "0-1"}, (4,), [(0, 1)], True),
        ({"actor": "0-2", "rollout": "2-3"}, (4,), [(2, 3)], False),
    ],
)
def test_an_engine_may_span_the_slots_of_ranks(placement, nodes, engines, beside):
    placed = placed_on(nodes, placement, tp=2)
    assert list(placed.engines) == engines
    assert placed.shared and placed.beside_actors == beside
    assert "engine" in placed.map() and "actor rank" in placed.map()


def test_ranks_that_share_rows_come_out_even():
    assert placed_on(4, {"actor": "0-3", "rollout": 0}, context=2).actor == (0, 1, 2, 3)


def test_halves_come_out_even_for_ranks_that_share_experts():
    config = asking("disaggregated")
    config.actor.fsdp_config.expert_parallel_size = 4
    config.actor.context_parallel_size = 2
    assert placement_of(config, (7,)).actor == (0, 1, 2, 3)


def test_elastic_engines_need_slots_of_their_own():
    config = asking({"actor": "nodes 0", "rollout": "0-1"}, elastic_rollout=True)
    check_placement(config)  # which slots node 0 has, only the cluster tells
    assert placement_of(asking("disaggregated", elastic_rollout=True), (2, 2)).engines == (
        (2,),
        (3,),
    )


def test_the_map_says_who_sits_where():
    placed = placed_on((4, 8, 2, 2), {"actor": "0-2", "rollout": "4-7:0,8-11:1-2"})
    assert placed.map(["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]).splitlines() == [
        "node 0 (10.0.0.1): slots 0-2: actor ranks 0-2; 3: free",
        "node 1 (10.0.0.2): slots 4-7: engine 0 of 4 slots; 8-11: engines 1-2 of 2 slots",
        "free: nodes 2-3",
    ]
    assert placed_on(2, "collocated").map() == "node 0: slots 0-1: actor ranks 0-1 and engines 0-1"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cluster.component_placement=disaggregated", {"actor,rollout": "disaggregated"}),
        ("cluster.component_placement=0-1", {"actor,rollout": "0-1"}),
        ("cluster.component_placement={actor: nodes 0 slots 0-1, rollout: node 1}",
         {"actor": "nodes 0 slots 0-1", "rollout": "node 1"}),
        ("cluster.component_placement={actor: 0, rollout: 1-2:0-1}", {"actor": 0, "rollout": "1-2:0-1"}),
    ],
)  # fmt: skip
def test_as_written_on_the_command_line(override, expected):
    assert load_config("toy-grpo-cpu", [override]).cluster.component_placement == expected
