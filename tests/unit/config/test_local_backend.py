"""`cluster.backend: local` is one process, which needs no placement."""

import pytest

from rlinf_vl.config import load_config


@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_the_placement_is_one_slot(schedule):
    config = load_config("toy-grpo-cpu", ["cluster.backend=local", f"runner.schedule={schedule}"])
    assert config.cluster.component_placement == {"actor,rollout": 0}
