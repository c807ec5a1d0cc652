"""A run's folder before its run: one process has it, and it holds the history of one run."""

import errno
import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.lines import EventLog
from rlinf_vl.runtime.checkpoints import checkpoints, find_checkpoint, load_state, save_checkpoint
from rlinf_vl.runtime.run_folder import locked, open_folder, run_folder
from rlinf_vl.tools.report.run_files import read_run

LEARNING_RATE = load_config("toy-grpo-cpu").actor.optim.lr


def written(folder: str) -> dict[str, str]:
    (Path(folder) / "w").write_text("w")
    return {"w": hashlib.sha256(b"w").hexdigest()}


def configured(tmp_path, *overrides):
    return load_config(
        "toy-grpo-cpu", [f"runner.output_dir={tmp_path}", "runner.experiment_name=run", *overrides]
    )


def opened(tmp_path, *overrides):
    """The folder and the checkpoint of a run, as `train` makes them ready."""
    config = configured(tmp_path, *overrides)
    folder = run_folder(config)
    checkpoint = find_checkpoint(folder, config.runner.resume_dir)
    return folder, open_folder(config, folder, checkpoint, EventLog(folder).add)


def trained(tmp_path, last, *overrides, every=2):
    """A folder as a run of `last` steps leaves it."""
    folder, checkpoint = opened(tmp_path, *overrides)
    first = load_state(checkpoint)["step"] + 1 if checkpoint else 1
    (folder / "trajectories").mkdir(exist_ok=True)
    (folder / "images").mkdir(exist_ok=True)
    for step in range(first, last + 1):
        for name in ("metrics.jsonl", "ledger.jsonl"):
            with (folder / name).open("a") as file:
                file.write(json.dumps({"step": step, "reward/mean": 0.5}) + "\n")
        (folder / f"trajectories/step_{step}.parquet").write_text("t")
        if step % every == 0:
            save_checkpoint(folder, step, written, {"step": step, "last": last}, keep_last=-1)
    return folder


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def train(*arguments):
    """`train` in a process of its own that must end without Ray and torch: the exit code, and what it has said."""
    code = """
import sys
from rlinf_vl.__main__ import main
code = main(["train", "toy-grpo-cpu", *sys.argv[1:]])
assert not {"ray", "torch"} & sys.modules.keys()
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def happened(folder):
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- a fresh start ----------------------------------------------------------------------------------------------------


def test_a_name_that_is_run_again_keeps_each_former_run_whole(tmp_path, caplog):
    caplog.set_level("INFO")
    folders = []
    for run in (1, 2):
        folder = trained(tmp_path, 2 * run)
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard/events.out").write_text(str(run))
        folders.append(content(folder))
    fresh, _ = opened(tmp_path)
    for run, before in enumerate(folders, 1):
        assert content(tmp_path / f"run.previous-{run}") == before
        assert read_run(tmp_path / f"run.previous-{run}").name == f"run.previous-{run}"
    assert sorted(content(fresh)) == ["config.yaml", "events.jsonl"]
    (event,) = happened(fresh)
    assert (
        event["kind"] == "folder_set_aside" and str(tmp_path / "run.previous-2") in event["message"]
    )
    assert event["message"] in caplog.text


def test_a_runs_folder_resumes_from_its_newest_checkpoint(tmp_path):
    folder = trained(tmp_path, 4)
    assert find_checkpoint(folder, str(folder)) == find_checkpoint(folder, "auto") is not None


def test_a_start_that_failed_before_its_first_step_takes_no_number(tmp_path):
    for _ in range(2):
        folder, _ = opened(tmp_path)
        (folder / "status.json").write_text(json.dumps({"state": "failed"}))
        (folder / "error.txt").write_text("Traceback")
    folder, _ = opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]
    assert not (folder / "error.txt").exists() and happened(folder) == []
    (folder / "status.json").write_text(json.dumps({"state": "failed"}))
    (folder / "notes.md").write_text("mine")
    opened(tmp_path)
    assert (tmp_path / "run.previous-1/notes.md").exists(), (
        "what somebody else has put there is kept"
    )


def test_auto_without_a_checkpoint_sets_a_used_folder_aside_and_leaves_a_strange_one_alone(
    tmp_path,
):
    trained(tmp_path, 1)
    folder, checkpoint = opened(tmp_path, "runner.resume_dir=auto")
    assert checkpoint is None and (tmp_path / "run.previous-1/metrics.jsonl").exists()
    assert not (folder / "metrics.jsonl").exists()
    other = tmp_path / "other"
    other.mkdir()
    # Who redirects a run's output there must not lose sight of it.
    (other / "slurm.log").write_text("mine")
    config = configured(tmp_path, "runner.experiment_name=other")
    open_folder(config, other, None, EventLog(other).add)
    assert (other / "slurm.log").exists() and not happened(other)


# --- a resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resume_goes_on_in_the_folder_and_names_the_keys_that_changed(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = trained(tmp_path, 4)
    before = content(folder)
    opened(tmp_path, "runner.resume_dir=auto")
    after = content(folder)
    assert after.keys() == before.keys() and not happened(folder), (
        "nothing has changed but resume_dir"
    )

    opened(
        tmp_path,
        "runner.resume_dir=auto",
        "actor.optim.lr=0.125",
        "runner.max_steps=9",
        "data.image_keys=[a,b]",
    )
    (event,) = happened(folder)
    assert (event["step"], event["kind"]) == (4, "config_changed")
    assert event["message"].startswith("keys that are not as they were: ")
    for part in (
        f"actor.optim.lr: {LEARNING_RATE} → 0.125",
        "→ 9",
        "data.image_keys: ['images'] → ['a', 'b']",
    ):
        assert part in event["message"] and part in caplog.text
    assert load_config(str(folder / "config.yaml")).actor.optim.lr == 0.125
    assert load_config(str(folder / "config.previous-1.yaml")).actor.optim.lr == LEARNING_RATE
    assert content(folder).keys() == before.keys() | {"config.previous-1.yaml", "events.jsonl"}


@pytest.mark.slow
def test_going_back_sets_the_newer_branch_aside_and_auto_goes_on_with_the_new_one(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = trained(tmp_path, 6)
    resume = f"runner.resume_dir={folder}/checkpoints/global_step_2"
    opened(tmp_path, resume, "actor.optim.lr=0.125")
    aside = folder / "abandoned-1"
    assert [step for step, _ in checkpoints(folder)] == [2]
    assert [step for step, _ in checkpoints(aside)] == [4, 6]
    assert sorted(path.name for path in (aside / "trajectories").iterdir()) == [
        f"step_{step}.parquet" for step in (3, 4, 5, 6)
    ]
    assert sorted(path.name for path in (folder / "trajectories").iterdir()) == [
        "step_1.parquet",
        "step_2.parquet",
    ]
    assert (aside / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert (aside / "images").resolve() == folder / "images"
    run = read_run(aside)
    assert (run.name, run.step, run.config["actor.optim.lr"]) == (
        "abandoned-1",
        6,
        str(LEARNING_RATE),
    )
    kinds = [event["kind"] for event in happened(folder)]
    assert kinds == ["branch_set_aside", "config_changed"] and str(aside) in caplog.text

    trained(tmp_path, 4, resume)
    assert load_state(find_checkpoint(folder, "auto"))["last"] == 4, "not the branch that was left"
    opened(tmp_path, resume)
    assert [step for step, _ in checkpoints(folder / "abandoned-2")] == [4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["another run", "this name's former run", "a branch that was left"]
)
def test_a_checkpoint_from_elsewhere_starts_a_folder_of_its_own(tmp_path, place):
    """The folder that the checkpoint is in stays as it is, whatever is set aside."""
    if place == "another run":
        source = trained(tmp_path, 4, "runner.experiment_name=other")
        trained(tmp_path, 8)
    elif place == "this name's former run":
        trained(tmp_path, 4)
        trained(tmp_path, 8)
        source = tmp_path / "run.previous-1"
    else:
        folder = trained(tmp_path, 4)
        opened(tmp_path, f"runner.resume_dir={folder}/checkpoints/global_step_2")
        source = folder / "abandoned-1"
    before = content(source)
    folder, checkpoint = opened(
        tmp_path, f"runner.resume_dir={source}/checkpoints/global_step_4", "runner.seed=77"
    )
    assert checkpoint is not None and load_state(checkpoint) == {"step": 4, "last": 4}
    assert content(checkpoint.parents[1]) == before
    assert sorted(content(folder)) == ["config.yaml", "events.jsonl"]
    assert [event["kind"] for event in happened(folder)] == ["folder_set_aside", "config_changed"]
    assert "runner.seed: 1234 → 77" in happened(folder)[1]["message"]


def test_a_relative_checkpoint_is_looked_for_where_the_user_stands(tmp_path, monkeypatch):
    folder = trained(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    config = configured(tmp_path, "runner.resume_dir=run/checkpoints/global_step_2")
    assert config.runner.resume_dir == str(folder / "checkpoints/global_step_2")


# --- what ends before it begins ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_left_is_said_and_changes_nothing(tmp_path):
    folder = trained(tmp_path, 4)
    before = content(folder)
    overrides = [
        f"runner.output_dir={tmp_path}",
        "runner.experiment_name=run",
        "runner.resume_dir=auto",
    ]
    code, output = train(*overrides, "runner.max_steps=4")
    assert code == 0 and "nothing left: step 4 of 4; raise runner.max_steps" in output
    assert content(folder) == before


HOLD = """
import sys, time
from pathlib import Path
from rlinf_vl.runtime.run_folder import locked
with locked(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has the lock of tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_folder_in_use_is_refused_with_who_uses_it_and_stays_as_it_is(tmp_path, holder):
    folder = trained(tmp_path, 2)
    before = content(tmp_path)
    for resume in ("null", "auto"):
        overrides = [
            f"runner.output_dir={tmp_path}",
            "runner.experiment_name=run",
            f"runner.resume_dir={resume}",
        ]
        code, message = train(*overrides)
        assert code == 2
        assert (
            f"{folder} is in use by another run: process {holder.pid} on {platform.node()}"
            in message
        )
        assert "runner.experiment_name" in message and "Traceback" not in message
    assert content(tmp_path) == before


def test_a_lock_ends_with_its_process_and_with_its_run(tmp_path, holder, caplog):
    os.kill(holder.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            with locked(tmp_path / "run"):
                break
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "run"):
        raise KeyboardInterrupt
    with (
        locked(tmp_path / "run"),
        pytest.raises(ConfigError, match="in use"),
        locked(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / ".run.lock").read_text() == "" and not caplog.text


def test_a_lock_left_on_another_host_is_warned_of(tmp_path, caplog):
    """Its run was killed, or goes on where the file system has no locks between hosts: only a person can tell."""
    (tmp_path / ".run.lock").write_text("process 7 on elsewhere")
    with locked(tmp_path / "run"):
        assert "process 7 on elsewhere" in caplog.text


def test_a_file_system_without_locks_is_warned_of_and_an_unwritable_folder_refused(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"runner\.output_dir: .*file can't be written"),
        locked(tmp_path / "file/run"),
    ):
        pass

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "run"):
        assert "this file system has no locks ([Errno 37] No locks available)" in caplog.text
        assert f"process {os.getpid()} on " in (tmp_path / ".run.lock").read_text()
