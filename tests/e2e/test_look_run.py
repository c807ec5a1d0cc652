"""Did it look: a real run under vision controls, and its recorded answers scored with and without their images."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from whole_run import metrics_of

from rlinf_vl import train
from rlinf_vl.__main__ import main
from rlinf_vl.extras.toy.drawings import GRID
from rlinf_vl.tools.report.look_files import WITH_BLANKS, WITH_IMAGES, look_file

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look")
    overrides = ["cluster.backend=local", "runner.max_steps=2", "runner.val_check_interval=2"]
    overrides += ["runner.save_interval=2", "data.val_samples=12", "data.rollout_batch_size=4"]
    overrides += ["data.vision_controls=[blank,swapped,cropped]", f"runner.output_dir={folder}"]
    train("toy-grpo-cpu", overrides)
    return folder / "toy-grpo-cpu"


def test_validations_have_the_split(run):
    rows = [row for row in metrics_of(run) if "val/seen" in row]
    assert [row["step"] for row in rows] == [0, 2]
    for row in rows:
        parts = row["val/gain_seen"] + row["val/gain_guessed"]
        assert row["val/gain"] == pytest.approx(parts)
        assert row["val/seen"] == pytest.approx(row["val/accuracy"] - row["val/accuracy_blank"])
        assert {"val/accuracy_swapped", "val/accuracy_cropped"} <= row.keys()
        assert row["val/control_errors"] == row["val/control_env_images"] == 0


def test_answers_are_scored_as_they_were_sampled_and_need_their_images(run, caplog):
    with caplog.at_level("INFO"):
        assert main(["look", str(run), "--heat-maps", "8", "--forwards", "40"]) == 0
    assert "of 8 heat maps sum to 0.5 nats or more" in caplog.text
    rows = pq.read_table(look_file(run, 2)).to_pylist()
    sampled = {
        row["group_id"]: row
        for row in pq.read_table(run / "trajectories/step_2.parquet").to_pylist()
        if row["split"] == "val"
    }
    assert len(rows) == len(sampled) == 12
    for row in rows:
        scored, blank = np.array(row[WITH_IMAGES]), np.array(row[WITH_BLANKS])
        # Two engines' arithmetic: the trainer's forward and the sampler's.
        np.testing.assert_allclose(scored, sampled[row["group_id"]]["rollout_logprobs"], atol=1e-4)
        assert np.abs(scored - blank).max() > 1e-3
    maps = [json.loads(row["heat_maps"]) for row in rows]
    assert [len(of_answer) for of_answer in maps] == [1] * 8 + [0] * 4
    hits = []
    for row, (made,) in zip(rows, maps[:8], strict=False):
        values = np.array(made["values"])
        assert values.shape == (GRID, GRID) and made["forwards"] <= 40
        width, height, x, y = map(
            int, re.search(r"(\d)x(\d)at(\d),(\d)", sampled[row["group_id"]]["labels"]).groups()
        )
        top, left = np.unravel_index(values.argmax(), values.shape)
        hits.append(y <= top < y + height and x <= left < x + width)
    # The rectangles have 1 to 3 of the 36 patches: by chance none or one of the peaks is inside.
    assert sum(hits) >= 6


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--step", "7"], "recorded are 0, 1, 2"), (["--checkpoint", "/nowhere"], "nowhere")],
)
def test_what_can_not_be_looked_at_is_told(run, arguments, reason, capsys, caplog):
    assert main(["look", str(run), *arguments]) == 2
    assert reason in capsys.readouterr().err + caplog.text
