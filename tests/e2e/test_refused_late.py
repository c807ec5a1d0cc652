"""What only a run's processes can find out: told in one message, the whole of it kept in the run's folder."""

import shutil

import pytest

from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from tests.whole_run import Run

pytestmark = pytest.mark.e2e


def test_the_error_of_an_actor(tmp_path):
    model = shutil.copytree(toy_checkpoint_path(), tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run = Run(tmp_path / "runs", f"rollout.model.model_path={model}")
    text = run.finish(expect=1)
    assert "SafetensorError: Error while deserializing header" in text
    # Beside what tells how the start gets on.
    told = [line for line in text.splitlines() if "INFO" not in line]
    assert len(told) <= 3 and "Traceback" not in text and "\x1b[" not in text, text
    assert f"The whole of it is in {run.folder / 'error.txt'}" in text
    assert "in load_model" in (run.folder / "error.txt").read_text()
