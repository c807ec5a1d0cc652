"""A whole run of the toy with a model of another family."""

import pytest
from whole_run import metrics_of, played_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_engine_and_trainer_agree_over_updates_of_gated_delta_nets(tmp_path):
    """The checkpoint knows nothing yet; the bonus for entropy moves every weight."""
    overrides = (
        "algorithm.entropy_bonus=0.1",
        "actor.optim.lr_warmup_steps=0",
        "data.rollout_batch_size=4",
    )
    rows = metrics_of(
        played_run(tmp_path, "toy-qwen3_5", 2, *overrides, recipe="toy-grpo-cpu-qwen3_5")
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["actor/grad_norm"] > 0
        assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5
        assert 0 < row["actor/rollout_train_abs_diff_max"] <= 2e-4
    assert rows[2]["rollout/weight_version_min"] == 1
