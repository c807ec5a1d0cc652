"""Checkpoint folders: complete or not there."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.run_folder import (
    ACTOR_FOLDER,
    CheckpointFailed,
    checkpoints,
    find_checkpoint,
    load_state,
    recover_checkpoints,
    save_checkpoint,
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
    with pytest.raises(ConfigError, match="runner.resume_dir"):
        find_checkpoint(tmp_path, str(tmp_path))


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    folder = save_checkpoint(tmp_path, 2, write, {"step": 2}, keep_last=1)
    (folder / "controller.json").write_bytes(b'{"step": \x00')
    with pytest.raises(ConfigError, match=r"runner\.resume_dir: .*global_step_2 is damaged .*name another"):
        load_state(find_checkpoint(tmp_path, "auto"))


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 3, write, {"a": 1}, keep_last=-1)
    save_checkpoint(tmp_path, 3, write, {"a": 2}, keep_last=-1)
    assert load_state(find_checkpoint(tmp_path, "auto")) == {"a": 2}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_what_was_just_written_is_never_pruned_whatever_lies_beside_it(tmp_path):
    for step in (10, 20, 30, 11, 12):
        save_checkpoint(tmp_path, step, write, {"step": step}, keep_last=2)
        assert load_state(tmp_path / f"checkpoints/global_step_{step}") == {"step": step}
        assert len(checkpoints(tmp_path)) == min(2, 1 + (step > 10))
    save_checkpoint(tmp_path, 13, write, {}, keep_last=1)
    assert [step for step, _ in checkpoints(tmp_path)] == [13]


@pytest.mark.parametrize("crash", ["first", "second", "none"])
def test_a_crash_while_a_step_is_saved_again_loses_no_checkpoint(tmp_path, monkeypatch, crash):
    """A process ends before either of the two renames, or between the second and the removal of what it replaced."""
    save_checkpoint(tmp_path, 3, write, {"a": 1}, keep_last=-1)
    rename, rmtree, calls = os.rename, shutil.rmtree, []

    def renamed(source, target):
        calls.append(target)
        if len(calls) == {"first": 1, "second": 2, "none": 3}[crash]:
            os._exit(9)
        rename(source, target)

    def removed(folder, **options):
        if crash == "none" and folder.name.endswith(".replaced"):
            os._exit(9)
        rmtree(folder, **options)

    if not (child := os.fork()):
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(shutil, "rmtree", removed)
        save_checkpoint(tmp_path, 3, write, {"a": 2}, keep_last=-1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2, "the crash left something"
    recover_checkpoints(tmp_path)
    assert load_state(find_checkpoint(tmp_path, "auto")) == {"a": 2 if crash == "none" else 1}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_3"]


def test_a_rename_that_fails_puts_back_what_was_to_be_replaced(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 3, write, {"a": 1}, keep_last=-1)
    rename = os.rename

    def renamed(source, target):
        if source.name.endswith(".tmp"):
            raise OSError("stale file handle")
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    with pytest.raises(CheckpointFailed, match=r"stale file handle.*global_step_3$"):
        save_checkpoint(tmp_path, 3, write, {"a": 2}, keep_last=-1)
    assert load_state(find_checkpoint(tmp_path, "auto")) == {"a": 1}


def test_the_baseline_is_the_best_constant_answer(tmp_path):
    write_baselines(tmp_path, Counter())
    assert not list(tmp_path.iterdir())
    write_baselines(tmp_path, Counter({"12": 3, "7": 5, "9": 2}))
    assert json.loads((tmp_path / "baselines.json").read_text()) == {"always 7": 0.5}
