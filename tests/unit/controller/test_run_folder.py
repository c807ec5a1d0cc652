"""Checkpoint folders: complete or not there."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rlinf_vl.controller.run_folder import (
    ACTOR_FOLDER,
    CheckpointFailed,
    checkpoints,
    find_checkpoint,
    load_state,
    save_checkpoint,
    set_checkpoints_aside,
    write_baselines,
)


def write(folder: str) -> None:
    (Path(folder) / "weights").write_text("w")


def test_save_find_and_prune(tmp_path):
    for step in (2, 4, 10):
        save_checkpoint(tmp_path, step, write, {"step": step}, keep_last=2)
    assert [step for step, _ in checkpoints(tmp_path)] == [4, 10]
    newest = find_checkpoint(tmp_path, "auto")
    assert load_state(newest) == {"step": 10}
    assert (newest / ACTOR_FOLDER / "weights").read_text() == "w"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_write_that_fails_leaves_the_last_one(tmp_path):
    save_checkpoint(tmp_path, 1, write, {"step": 1}, keep_last=1)

    def fail(folder):
        write(folder)
        raise OSError("No space left on device")

    with pytest.raises(CheckpointFailed, match=r"step 2 .*No space left.*MB are free.*room for 2.*global_step_1$"):
        save_checkpoint(tmp_path, 2, fail, {"step": 2}, keep_last=1)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1, "what was half written is gone"
    assert find_checkpoint(tmp_path, "auto").name == "global_step_1"


def test_auto_passes_over_half_written_ones(tmp_path):
    (tmp_path / "checkpoints/global_step_7" / ACTOR_FOLDER).mkdir(parents=True)
    (tmp_path / "checkpoints/.global_step_8.tmp").mkdir()
    assert find_checkpoint(tmp_path, "auto") is None
    assert find_checkpoint(tmp_path, None) is None


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="runner.resume_dir"):
        find_checkpoint(tmp_path, str(tmp_path))


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 3, write, {"a": 1}, keep_last=-1)
    save_checkpoint(tmp_path, 3, write, {"a": 2}, keep_last=-1)
    assert load_state(find_checkpoint(tmp_path, "auto")) == {"a": 2}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_fresh_start_in_a_used_folder_keeps_the_former_checkpoints_apart(tmp_path):
    assert set_checkpoints_aside(tmp_path) is None
    for run in (1, 2):
        save_checkpoint(tmp_path, 9, write, {"run": run}, keep_last=1)
        aside = set_checkpoints_aside(tmp_path)
        assert aside.name == f"checkpoints.previous-{run}"
        assert load_state(aside / "global_step_9") == {"run": run}
        assert find_checkpoint(tmp_path, "auto") is None


def test_the_baseline_is_the_best_constant_answer(tmp_path):
    write_baselines(tmp_path, Counter())
    assert not list(tmp_path.iterdir())
    write_baselines(tmp_path, Counter({"12": 3, "7": 5, "9": 2}))
    assert json.loads((tmp_path / "baselines.json").read_text()) == {"always 7": 0.5}
