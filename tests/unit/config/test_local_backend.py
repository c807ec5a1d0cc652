"""`cluster.backend: local` refuses what one process can't have, all at once, with the way out."""

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.evaluation import evaluation_config

LOCAL = "cluster.backend=local"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("cluster.num_nodes=2", "set cluster.num_nodes=1"),
        ("cluster.elastic_rollout=true", "set cluster.elastic_rollout=false"),
        ("actor.context_parallel_size=2", "set actor.context_parallel_size=1"),
        ("rollout.rollout_backend=sglang", "set rollout.rollout_backend=torch"),
        ("rollout.tensor_parallel_size=2", "set rollout.tensor_parallel_size=1"),
        ("rollout.weight_sync=delta", "set rollout.weight_sync=auto"),
        ("runner.schedule=async", "set runner.schedule=sync or one_step_off"),
    ],
)
def test_what_one_process_has_not_is_refused(override, hint):
    with pytest.raises(ConfigError) as refused:
        load_config("toy-grpo-cpu", [LOCAL, override])
    key, _, value = override.partition("=")
    problem = next(p for p in refused.value.problems if "cluster.backend: local" in p)
    assert problem.startswith(f"{key}: {value}")
    assert hint in problem and "or cluster.backend=ray" in problem


def test_all_of_it_at_once():
    overrides = ["rollout.rollout_backend=sglang", "runner.schedule=async", "cluster.num_nodes=3"]
    with pytest.raises(ConfigError) as refused:
        load_config("toy-grpo-cpu", [LOCAL, *overrides])
    assert sum("cluster.backend: local" in problem for problem in refused.value.problems) == 3


@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_the_placement_is_one_slot(schedule):
    config = load_config("toy-grpo-cpu", [LOCAL, f"runner.schedule={schedule}"])
    assert config.cluster.component_placement == {"actor,rollout": 0}


def test_an_evaluation_needs_ray():
    with pytest.raises(ConfigError, match="needs cluster.backend=ray"):
        evaluation_config("toy-grpo-cpu", [LOCAL, "model=toy"], 1, [])
