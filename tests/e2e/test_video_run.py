"""A whole run on videos: rows with files and lists of frames, through engine and trainer, to what it leaves."""

import io
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image
from whole_run import LOCAL, Run, rows_of

from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.observe.clip_files import frames_of
from rlinf_vl.tools.report.build import build_report

pytestmark = pytest.mark.e2e
#: Supervised steps: too few to read a video, enough to end an answer.
STEPS = 20


def test_videos_are_sampled_trained_on_and_shown(tmp_path: Path) -> None:
    model = toy_checkpoint_path("toy-video", steps=STEPS, progress=False)
    overrides = (
        f"rollout.model.model_path={model}", "data.train_data_paths=[toy-video]", "data.val_data_paths=[toy-video]",
        "data.image_keys=[]", "data.video_keys=[videos]", "data.val_samples=12", "data.rollout_batch_size=4",
        "runner.max_steps=2", "runner.val_check_interval=2", "runner.save_interval=-1",
    )  # fmt: skip
    run = Run(tmp_path, LOCAL, *overrides)
    run.finish()
    steps = [row for row in rows_of(run.folder / "metrics.jsonl") if row["step"]]
    assert len(steps) == 2
    for row in steps:
        # The engine and the trainer saw the same frames at the same times.
        assert row["actor/rollout_train_abs_diff_max"] < 5e-5
    table = pq.read_table(run.folder / "trajectories/step_1.parquet").to_pylist()
    assert len(table) == 4 * 8
    for row in table:
        assert row["prompt"].count("<video>") == 1 and "video_pad" not in row["prompt"]
        (conversation,) = json.loads(row["messages"])
        question = next(m["content"] for m in conversation if m["role"] == "user")
        assert question == [0, "Which way does it move?"]
        (name,) = row["images"]
        frames = frames_of(Image.open(io.BytesIO((run.folder / name).read_bytes())))
        assert [seconds for _, seconds in frames] == [0.0, 0.5, 1.0, 1.5]
    page = build_report([run.folder], tmp_path / "report.html").read_text()
    assert not re.search(r"\d images? left out", page)
