"""The live page of a run: what it says, that it fits its terminal, and when it ends."""

import io
import json
import os
import platform
import re
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from unit.observe.conversations import make_conversations
from unit.report.test_report import HOSTILE

from rlinf_vl.tools.report import watch as watch_module
from rlinf_vl.tools.report.watch import Curve, RunPage, watch

NOW = 1_800_000_000.0


def write_status(folder, **changes):
    worker = {"node": "7a4f04e4", "state": "alive", "restarts": 0}
    status = {
        "pid": os.getpid(),
        "host": platform.node(),
        "time": NOW - 3,
        "started": NOW - 600,
        "state": "running",
        "step": 40,
        "total_steps": 60,
        "phase": "generate",
        "phase_since": NOW - 3,
        "progress": {"done": 45, "total": 128},
        "workers": [
            worker | {"name": "rollout 0", "pid": 11},
            worker | {"name": "rollout 1", "pid": 12, "state": "restarting", "restarts": 2},
            worker | {"name": "actor 0", "pid": 13},
        ],
    }
    (folder / "status.json").write_text(json.dumps(status | changes))


def write_steps(folder, steps, mode="w"):
    with (folder / "metrics.jsonl").open(mode) as file:
        for step in steps:
            row = {
                "step": step,
                "reward/mean": step / 100,
                "actor/grad_norm": 0.5,
                "rollout/tokens_per_second": 14200.0,
            }
            row |= {"val/accuracy": 0.25} if step % 5 == 0 else {}
            file.write(
                json.dumps(row | {"time/step": 10.0, "time/generate": 5.0, "time/train": 4.0})
                + "\n"
            )


@pytest.fixture
def run(tmp_path):
    write_status(tmp_path)
    write_steps(tmp_path, range(1, 41))
    event = {
        "time": NOW - 50,
        "step": 9,
        "kind": "worker_replaced",
        "message": "\x1b[2Jit died\n" + "long " * 100,
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    return tmp_path


def text(run, width=80, height=24, now=NOW):
    lines = RunPage(run).draw(width, height, now)
    assert all(
        line.cell_len == width and "\n" not in line.plain and "\x1b" not in line.plain
        for line in lines
    )
    assert len(lines) <= height
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (200, 50), (139, 60), (140, 20), (50, 12), (20, 5)]
)
def test_it_fits(run, width, height):
    text(run, width, height)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_it_tells_what_there_is_to_tell(run, width, height):
    page = text(run, width, height)
    for said in (
        f"{run.name}",
        "step 40/60",
        "67%",
        "running",
        "0:10:00 so far · 0:03:20 left · 10 s a step",
        "curves, steps 1 to 40",
        "reward ",
        "0.4      0.01       0.4",
        "val accuracy",
        "14,200",
        "now  generate  3 s (usually 5 s)",
        "45 of 128",
        "phases now and in the last 20 steps",
        "█ generate 50% ▓ train 40% ▒ other 10%",
        "rollout   ●○  1 alive, 1 restarting, restarts: 2",
        "actor     ●  1 alive",
        "step 9 worker replaced:  [2Jit died long long",
        "…",
    ):
        assert said in page, said
    assert ("process 12 on 7a4f04e4" in page) == (width == 200)
    assert "entropy" not in page


def test_a_long_silence_is_told(run):
    assert "running" in text(run, now=NOW + 50)
    assert "no news for 0:01:20" in text(run, now=NOW + 77)
    write_steps(run, [41])
    (run / "metrics.jsonl").write_text('{"step": 41, "time/step": 100.0}\n')
    assert "running" in text(run, now=NOW + 77)


def test_a_run_that_just_starts_and_torn_files(tmp_path):
    (tmp_path / "config.yaml").write_text("runner: {")
    assert "no status.json" in text(tmp_path)
    write_status(
        tmp_path,
        state="starting",
        step=0,
        total_steps=0,
        phase="starting Ray",
        progress=None,
        workers=[],
    )
    page = text(tmp_path)
    assert "step 0 " in page and "starting" in page and "now  starting Ray  3 s" in page
    (tmp_path / "status.json").write_text('{"pid": 1')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/me\n[1]\n\x00\n{"step": 2, "reward/mean": null}\n'
    )
    (tmp_path / "events.jsonl").write_text("7\n")
    page = text(tmp_path)
    assert "curves, steps 2 to 2" in page and "nan" in page


def test_it_follows_what_is_appended_and_what_is_taken_back(run):
    page = RunPage(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "rew')
        file.flush()
        page.poll()
        assert "steps 1 to 40 " in str(page.draw(80, 24, NOW)[2])
        file.write('ard/mean": 0.9}\n')
    page.poll()
    assert "steps 1 to 41 " in str(page.draw(80, 24, NOW)[2])
    fresh = run / "scratch"  # as a resume does
    fresh.mkdir()
    write_steps(fresh, range(1, 8))
    os.replace(fresh / "metrics.jsonl", run / "metrics.jsonl")
    write_status(run, step=7)
    page.poll()
    assert "step 7/60" in str(page.draw(80, 24, NOW)[0])
    assert "steps 1 to 7 " in str(page.draw(80, 24, NOW)[2])


def test_what_has_not_changed_is_not_read_again(run, monkeypatch):
    page, read = RunPage(run), []
    monkeypatch.setattr(watch_module, "read_metrics", lambda path, notes: read.append(path) or [])
    page.poll()
    assert read == []
    write_steps(run, [41], mode="a")
    page.poll()
    page.poll()
    assert read == [run]


def test_curve_is_scaled_and_held():
    curve = Curve([{}, {}, {"x": 0.0}, {"x": None}, {"x": 1.0}, {}, {}, {}], "x")
    assert curve.draw(8, 1) == ["  ▁▁████"]
    assert curve.draw(8, 2) == ["    ████", "  ▁▁████"]
    assert (curve.low, curve.high, curve.last) == (0.0, 1.0, 1.0)
    assert Curve([{"x": 3.0}], "x").draw(4, 1) == ["▁▁▁▁"]


def terminal(width=80, height=24):
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, highlight=False
    )


@pytest.mark.slow
def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    command = [sys.executable, "-m", "rlinf_vl", "watch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        f"error: {tmp_path} is not a run's folder"
    )
    with pytest.raises(ValueError, match="absent is not a run's folder"):
        watch(tmp_path / "absent")


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_it_stops_when_the_run_has_ended(run, monkeypatch, state):
    rounds = []

    def end(seconds):
        rounds.append(seconds)
        if len(rounds) == 2:
            write_status(run, state=state, time=NOW)

    monkeypatch.setattr(watch_module.time, "sleep", end)
    console = terminal()
    watch(run, console=console)
    assert len(rounds) == 2
    last = console.file.getvalue().split("\x1b[?1049l")[-1]  # after the alternate screen is left
    assert f"ended: {state}" in last and "0:10:00 in all" in last and "left" not in last


def test_a_process_that_is_gone_has_ended(run):
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_status(run, pid=gone.pid)
    console = terminal()
    watch(run, console=console)
    assert "ended: its process is gone" in console.file.getvalue()
    write_status(run, pid=gone.pid, host="elsewhere")
    assert "running" in text(run)


def test_ctrl_c_leaves_cleanly(run, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_module.time, "sleep", interrupt)
    console = terminal()
    watch(run, console=console)
    # The screen is given back.
    assert "\x1b[?1049l" in console.file.getvalue() and "\x1b[?25h" in console.file.getvalue()


def test_once_and_pipes_get_one_page(run, monkeypatch):
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: pytest.fail("it waited"))
    console = terminal(80, 25)
    watch(run, once=True, console=console)
    assert "?1049" not in console.file.getvalue()
    pipe = Console(file=io.StringIO(), width=80, height=25)
    watch(run, console=pipe)
    assert "step 40/60" in pipe.file.getvalue() and "\x1b" not in pipe.file.getvalue()


def test_a_long_run_stays_cheap(tmp_path):
    write_steps(tmp_path, range(1, 20_001))
    page, start = RunPage(tmp_path), time.perf_counter()
    for _ in range(10):
        page.poll()
        page.draw(200, 50, NOW)
    assert time.perf_counter() - start < 2  # a tenth of it is usual


def test_a_terminal_without_unicode_gets_ascii(run):
    raw = io.BytesIO()
    console = Console(
        file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=80, height=25
    )
    watch(run, once=True, console=console)
    assert b"step 40/60" in raw.getvalue()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (20, 5)])
def test_a_failed_run_says_why(run, width, height):
    write_status(
        run,
        state="failed",
        reason="ValueError: no GPU\x1b[2J\n  File worker.py, line 3\n" + "more\n" * 50,
    )
    page = text(run, width, height)
    assert "no GPU" in page.replace("\n", " ") or width == 20
    assert (
        ("worker.py, line 3" in page) == (width > 20)
        and "ended: failed" in page.replace("\n", "")
        or width == 20
    )
    write_status(run, state="running", reason="")
    assert "no GPU" not in text(run, width, height)
    write_status(run, pid=2**22, started=NOW)
    assert width == 20 or "ended without a word" in text(run, width, height)


@pytest.mark.parametrize(("width", "height"), [(200, 50), (100, 60)])
def test_the_newest_conversation_is_shown_with_its_pictures(tmp_path, width, height):
    run = make_conversations(tmp_path / "talk")
    page = text(run, width, height)
    row = pq.read_table(run / "trajectories/step_6.parquet").to_pylist()[-1]
    assert (
        f"newest conversation: training at step 6, problem {row['problem_id']}: right, reward 1"
        in page
    )
    assert re.search(r"success by number of turns  4: 100% of \d", page)
    for said in ("1 zoom", 'call zoom {"box": [0, 0, 160, 100]}'):
        assert said in page, said
    for said in (
        "the arguments are no JSON object",
        f"\\boxed{{{row['answer']}}}  reward 1",
        "turns ",
        "env/distance_lef",
    ):
        assert said in page, said
    drawn = [line for line in RunPage(run).draw(width, height, NOW) if "▀" in line.plain]
    assert len(drawn) == 8 and any(
        "#f4f1e8" in str(span.style) for line in drawn for span in line.spans
    )


def test_where_there_is_little_room_or_only_one_turn_no_conversation_is_shown(tmp_path, run):
    talk = make_conversations(tmp_path / "talk", steps=1)
    assert "conversation" not in text(talk, 80, 24) and "conversation" not in text(run, 200, 50)


def test_a_new_file_is_followed_and_what_it_has_broken_is_left_out(tmp_path):
    run = make_conversations(tmp_path / "talk", steps=1)
    page = RunPage(run)
    rows = pq.read_table(run / "trajectories/step_1.parquet").to_pylist()
    broken = ("{", "[]", '{"turns": [{"start": {}}]}', "7", "null")
    odd = [
        row | {"turns": turns, "messages": messages}
        for row in rows
        for turns in broken
        for messages in broken
    ]
    shown = [
        row | {"step": 2, "problem_id": HOSTILE, "images": ["../x", "no.png", *row["images"]]}
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(odd + shown + odd), run / "trajectories/step_2.parquet")
    page.poll()
    drawn = page.draw(200, 50, NOW)
    said = "\n".join(line.plain for line in drawn)
    assert "at step 2" in said and all(
        line.cell_len == 200 and "\u202e" not in line.plain for line in drawn
    )
    (run / "trajectories/step_3.parquet").write_bytes(b"torn")
    page.poll()
    assert "at step 2" in "\n".join(line.plain for line in page.draw(200, 50, NOW))


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_workers_of_an_ended_run_are_not_alive(run, state):
    write_status(run, state=state)
    page = text(run, 200, 50)
    assert "alive" not in page and "restarting" not in page
    assert "rollout   ··  2 ended" in page and "actor     ·  1 ended" in page
