"""`status.json` says how a run ended and why, also where its process could not say it any more."""

import json
import os
import subprocess
import sys
import time

import pytest

from rlinf_vl.errors import RunError
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.status import REASON_LINES, StatusFile, last_words, read_status


def end_with(folder, error):
    with pytest.raises(type(error)), RunProgress(StatusFile(folder)) as progress:
        progress.begin(10, 3)
        raise error
    return read_status(folder)


def test_an_error_of_ours_is_the_reason_word_for_word(tmp_path):
    status = end_with(tmp_path, RunError("30 of 100 rows are bad:\n  table\nRepair them."))
    assert (status["state"], status["reason"]) == (
        "failed",
        "30 of 100 rows are bad:\n  table\nRepair them.",
    )
    assert len(last_words(RunError("line\n" * 1000)).splitlines()) == REASON_LINES


def test_any_other_error_is_its_last_line_and_where_it_was(tmp_path):
    reason = end_with(tmp_path, KeyError("missing"))["reason"].splitlines()
    assert reason[0] == "KeyError: 'missing'" and len(reason) < 12
    assert any("test_status.py" in line and "in end_with" in line for line in reason[1:])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_a_run_stopped_at_once_says_so(tmp_path, error):
    status = end_with(tmp_path, error)
    assert status["state"] == "stopped" and "without a checkpoint" in status["reason"]


def test_a_run_that_went_well_has_no_reason(tmp_path):
    with RunProgress(StatusFile(tmp_path)):
        pass
    assert read_status(tmp_path)["state"] == "done" and read_status(tmp_path)["reason"] == ""


def killed(folder):
    """A process that says it runs, and is killed."""
    code = (
        "import pathlib, time; from rlinf_vl.observe.status import StatusFile\n"
        f"StatusFile(pathlib.Path({str(folder)!r})).update(state='running', step=7, phase='train')\n"
        "print('there', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    return process


def test_a_killed_run_is_gone_and_not_running(tmp_path):
    process = killed(tmp_path)
    assert read_status(tmp_path)["state"] == "running"
    process.kill()
    while read_status(tmp_path)["state"] == "running":  # also as a zombie
        time.sleep(0.01)
    status = read_status(tmp_path)
    process.communicate()
    assert status["state"] == "gone"
    assert all(
        said in status["reason"]
        for said in (f"process {process.pid} ", "killed", "step 7", "phase train")
    )
    assert read_status(tmp_path)["state"] == "gone"


def test_another_process_that_got_the_id_is_not_the_run(tmp_path):
    StatusFile(tmp_path).update(state="running")
    path = tmp_path / "status.json"
    status = json.loads(path.read_text())
    assert status["pid"] == os.getpid() and read_status(tmp_path)["state"] == "running"
    path.write_text(json.dumps(status | {"started": status["started"] - 7 * 86400}))
    assert read_status(tmp_path)["state"] == "gone"
    path.write_text(
        json.dumps(status | {"started": status["started"] - 7 * 86400, "host": "elsewhere"})
    )
    assert read_status(tmp_path)["state"] == "running"  # nothing is known of another host's process


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "{}", '{"state": "running", "host": 1}'])
def test_a_torn_file_says_nothing(tmp_path, content):
    assert read_status(tmp_path) == {}
    (tmp_path / "status.json").write_text(content)
    assert read_status(tmp_path) in ({}, {"state": "running", "host": 1})


def test_what_changes_several_times_a_step_is_written_soon_and_at_once_with_anything_else(
    tmp_path, monkeypatch
):
    written = []
    monkeypatch.setattr("rlinf_vl.observe.status.DELAY_S", 0.05)
    status, write = StatusFile(tmp_path), StatusFile._write
    monkeypatch.setattr(
        StatusFile, "_write", lambda self: (write(self), written.append(read_status(tmp_path)))
    )
    status.update(state="running")
    for step in range(100):
        status.update(phase="generate")
        status.update(step=step, phase="train")
    while written[-1]["step"] < 99:  # appended after its file is there
        time.sleep(0.01)
    assert len(written) < 100 and written[-1]["phase"] == "train"
    status.update(step=100)
    status.update(state="done", reason="")
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["step"]) == ("done", 100)
    count = len(written)
    time.sleep(0.2)
    assert len(written) == count, "what was written is not written again"
