"""Checkpoint folders: complete or not there."""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from upath import UPath

from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.checkpoints import (
    ACTOR_FOLDER,
    SUMS_FILE,
    CheckpointFailed,
    checkpoints,
    damage,
    find_checkpoint,
    folder_at,
    load_state,
    recover_checkpoints,
    save_checkpoint,
    set_damaged_aside,
)
from rlinf_vl.runtime.run_folder import read_prior, write_baselines


def write(folder: str) -> dict[str, str]:
    (folder_at(folder) / "weights").write_text("w")
    return {"weights": hashlib.sha256(b"w").hexdigest()}


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

    with pytest.raises(
        CheckpointFailed, match=r"step 2 .*No space left.*MB are free.*room for 2.*global_step_1$"
    ):
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
    with pytest.raises(
        ConfigError, match=r"runner\.resume_dir: .*global_step_2 is damaged .*name another"
    ):
        load_state(folder)


@pytest.mark.parametrize(
    ("strike", "said"),
    [
        (lambda f: (f / "actor/weights").write_text("v"), "actor/weights is not as it was written"),
        (lambda f: (f / "actor/weights").write_text(""), "actor/weights is not as it was written"),
        (lambda f: (f / "actor/weights").unlink(), "actor/weights is missing"),
        (
            lambda f: (f / "controller.json").write_text('{"step": 5}'),
            "controller.json is not as it was written",
        ),
        (
            lambda f: (f / "SHA256SUMS").write_bytes(b"\xff\x00"),
            "SHA256SUMS is not as it was written",
        ),
        (lambda f: (f / "SHA256SUMS").write_text(""), "SHA256SUMS is not as it was written"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_damaged_checkpoint_is_refused_and_the_newest_whole_one_before_it_is_the_way_out(
    tmp_path, strike, said, named
):
    first, second, third, newest = (
        save_checkpoint(tmp_path, step, write, {"step": step}, keep_last=-1)
        for step in (1, 2, 3, 4)
    )
    (third / "actor/weights").write_text("as bad")
    strike(newest)
    with pytest.raises(ConfigError) as refusal:
        find_checkpoint(tmp_path, str(newest) if named else "auto")
    assert f"{newest} is damaged ({said})" in str(refusal.value)
    assert str(refusal.value).endswith(f"runner.resume_dir={second}")
    assert find_checkpoint(tmp_path, str(second)) == second
    for folder in (first, second):
        strike(folder)
    with pytest.raises(ConfigError, match="start afresh"):
        find_checkpoint(tmp_path, str(newest))


def test_a_person_can_check_the_digests(tmp_path):
    folder = save_checkpoint(tmp_path, 1, write, {"step": 1}, keep_last=-1)
    checked = subprocess.run(
        ["sha256sum", "-c", SUMS_FILE], cwd=folder, capture_output=True, text=True
    )
    assert checked.returncode == 0 and checked.stdout == "actor/weights: OK\ncontroller.json: OK\n"


def test_damaged_ones_are_set_aside_until_one_is_whole(tmp_path):
    folders = [
        save_checkpoint(tmp_path, step, write, {"step": step}, keep_last=-1) for step in (1, 2, 3)
    ]
    for folder in folders[1:]:
        (folder / "actor/weights").write_text("v")
    told: list[str] = []
    set_damaged_aside(tmp_path, told.append)
    assert [step for step, _ in checkpoints(tmp_path)] == [1] and len(told) == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[:2] == [
        "damaged.global_step_2",
        "damaged.global_step_3",
    ]


def test_the_best_are_kept_beside_the_last(tmp_path):
    accuracies = {10: 0.25, 20: 0.75, 30: 0.5, 40: 0.75, 60: 0.1}
    for step in range(10, 80, 10):
        known = {at: value for at, value in accuracies.items() if at <= step}
        save_checkpoint(
            tmp_path, step, write, {"step": step}, keep_last=2, keep_best=1, accuracies=known
        )
    assert [step for step, _ in checkpoints(tmp_path)] == [20, 60, 70]
    save_checkpoint(
        tmp_path, 80, write, {}, keep_last=1, keep_best=2, accuracies=accuracies | {80: 0.9}
    )
    assert [step for step, _ in checkpoints(tmp_path)] == [20, 80]


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


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_process_that_is_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path, place
):
    """It ends before each of its calls that change files, one after another, until a save has none left."""
    home = tmp_path if place == "disk" else UPath(f"file://{tmp_path}")
    first = save_checkpoint(home, 1, write, {"step": 1}, keep_last=1)
    calls = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
    seen = set()
    for moment in itertools.count():
        if not (child := os.fork()):
            left = [moment]

            def strike(event, arguments, left=left):
                if event in calls and (event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                    left[0] -= 1
                    if left[0] < 0:
                        os._exit(9)

            sys.addaudithook(strike)
            save_checkpoint(home, 2, write, {"step": 2}, keep_last=1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        known = checkpoints(home)
        assert known and not any(damage(folder) for _, folder in known), moment
        recover_checkpoints(home)
        newest = find_checkpoint(home, "auto")
        step = load_state(newest)["step"]
        seen.add(step)
        assert len(list((home / "checkpoints").iterdir())) == len(checkpoints(home)), (
            "nothing half written is left"
        )
        shutil.rmtree(tmp_path / "checkpoints")
        save_checkpoint(home, 1, write, {"step": 1}, keep_last=1)
    assert seen == {1, 2} and moment > 5 and first.exists() is False


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
    assert read_prior(tmp_path) == 0.5 and read_prior(tmp_path / "gone") == 0.0
