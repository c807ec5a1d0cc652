"""What only a run's processes can find out: told in one message, the whole of it kept in the run's folder."""

import json
import shutil

import pytest

from rlinf_vl.toy.model import toy_checkpoint_path
from tests.whole_run import Run

pytestmark = pytest.mark.e2e


def test_prompts_that_are_all_too_long(tmp_path):
    rows = [{"problem": "word " * (600 + i), "answer": "1"} for i in range(20)]
    (data := tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"data.train_data_paths=[{data}]", "data.val_data_paths=[]", "data.image_keys=[]"]
    text = Run(tmp_path / "runs", *overrides).finish(expect=2)
    assert "Traceback" not in text
    (message,) = [line for line in text.splitlines() if line.startswith("error: ")]
    for part in (
        "data.train_data_paths: of 20 rows 0 can be used",
        "data.rollout_batch_size=16 needs more",
        "prompts of 3008 to 3103 tokens, above data.max_prompt_length=512: raise that",
    ):
        assert part in message


def test_the_error_of_an_actor(tmp_path):
    model = shutil.copytree(toy_checkpoint_path(), tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run = Run(tmp_path / "runs", f"rollout.model.model_path={model}")
    text = run.finish(expect=1)
    assert "SafetensorError: Error while deserializing header" in text
    assert len(text.splitlines()) <= 6 and "Traceback" not in text, text
    assert f"The whole of it is in {run.folder / 'error.txt'}" in text
    assert "in load_model" in (run.folder / "error.txt").read_text()
