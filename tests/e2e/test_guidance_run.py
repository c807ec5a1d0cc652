"""A whole run that is guided by all there is beside the reward: a teacher, PAPO, corrupted images."""

import pyarrow.parquet as pq
import pytest
from whole_run import metrics_of, played_run

pytestmark = pytest.mark.e2e


def test_a_teacher_papo_and_corrupted_images_in_one_run(tmp_path, toy_folder):
    overrides = (
        f"algorithm.distillation.teacher_path={toy_folder}", "algorithm.papo={weight: 0.01, entropy_weight: 0.03}",
        "algorithm.image_corruption.share=0.5", "algorithm.n_minibatches=2", "data.rollout_batch_size=4",
    )  # fmt: skip
    run = played_run(tmp_path, "toy", 2, *overrides, recipe="toy-grpo-cpu")
    for row in metrics_of(run)[1:]:
        assert (
            row["actor/grad_norm"] > 0
            and row["actor/papo_kl"] > 0
            and row["actor/papo_entropy"] > 0
        )
        assert row["actor/teacher_kl"] != 0 and "reward/corrupted_mean" in row
        assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5, (
            "compared where engine and trainer saw the same"
        )
    rows = [
        row
        for row in pq.read_table(run / "trajectories/step_1.parquet").to_pylist()
        if row["split"] == "train"
    ]
    assert rows and [row["corrupted"] for row in rows] == [row["sample"] >= 4 for row in rows]
    for row in rows:
        (clean,) = {
            tuple(r["images"])
            for r in rows
            if r["group_id"] == row["group_id"] and not r["corrupted"]
        }
        assert (tuple(row["images"]) == clean) != row["corrupted"] and all(
            (run / name).exists() for name in row["images"]
        )
