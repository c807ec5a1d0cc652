"""The progress line on a terminal and the log lines elsewhere."""

import io
import logging
import re

import pytest
from rich.console import Console

from rlinf_vl.observe import progress
from rlinf_vl.observe.progress import RunProgress, setup_logging

METRICS = {
    "reward/mean": 0.5,
    "reward/accuracy": 0.25,
    "actor/rollout_train_kl": 0.0012,
    "rollout/tokens_per_second": 12345.6,
    "time/step": 2.0,
}


@pytest.fixture
def root_logging():
    root, library = logging.getLogger(), logging.getLogger("rlinf_vl")
    handlers, level = root.handlers[:], library.level
    yield root
    root.handlers[:] = handlers
    library.setLevel(level)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=160, _environ={"TERM": "xterm"})


def test_elsewhere_each_step_is_one_log_line(caplog):
    caplog.set_level(logging.INFO, "rlinf_vl")
    output = io.StringIO()
    with RunProgress(console=Console(file=output)) as run:
        run.begin(4)
        run.phase("start-up")
        run.update(1, METRICS | {"val/accuracy": 0.75})
        run.phase("train")
        run.update(2, METRICS)
    first, second = caplog.messages
    assert (
        first
        == "step 1/4  reward 0.500  accuracy 0.250  val 0.750  mismatch 0.0012  tok/s 12,346  left 0:00:06"
    )
    assert second.startswith("step 2/4  reward 0.500") and "val 0.750" in second
    assert output.getvalue() == ""


def test_the_mismatch_and_the_reference_kl_have_names_of_their_own_beside_ties_and_cuts(caplog):
    caplog.set_level(logging.INFO, "rlinf_vl")
    with RunProgress(console=Console(file=io.StringIO())) as run:
        run.begin(1)
        run.update(
            1,
            METRICS
            | {"actor/ref_kl": 0.25, "reward/zero_std_groups": 3, "rollout/truncated": 0.125},
        )
    figures = "tied 3  cut 12%  ref_kl 0.25  mismatch 0.0012"
    assert figures in caplog.messages[-1] and " kl " not in caplog.messages[-1]


def test_every_phase_of_start_up_has_a_clock(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "rlinf_vl")
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    run = RunProgress(console=Console(file=io.StringIO()))
    for elapsed, phase in (
        (0, "starting Ray"),
        (4, "starting rollout workers and actor ranks"),
        (9, "sharding"),
    ):
        now[0] = 100.0 + elapsed
        run.phase(phase)
        run.phase(phase, done=1, total=2)  # a phase's progress is no phase of its own
    assert caplog.messages == [
        "start-up, 0 s: starting Ray",
        "start-up, 4 s: starting rollout workers and actor ranks",
        "start-up, 9 s: sharding",
    ]
    run.begin(3)
    run.phase("generate")
    assert len(caplog.messages) == 3, "steps are told by their own lines"


def test_the_live_line_counts_the_seconds_of_a_phase(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    console = terminal()
    with RunProgress(console=console) as run:
        run.phase("starting Ray")
        now[0] = 107.0
        run._live.refresh()
    assert "starting Ray (7 s)" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_metrics_that_are_missing_are_not_shown(caplog):
    caplog.set_level(logging.INFO, "rlinf_vl")
    with RunProgress(console=Console(file=io.StringIO())) as run:
        run.begin(2)
        run.update(1, {})
        run.update(2, {"reward/mean": float("nan")})
    assert [m.strip() for m in caplog.messages] == ["step 1/2", "step 2/2  reward nan"]


def test_time_left_is_judged_by_the_last_steps_and_not_by_start_up(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "rlinf_vl")
    now = iter([1000.0, 1003.0, 1007.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    run = RunProgress(console=Console(file=io.StringIO()))
    run.begin(100, 90)
    for step in (91, 92, 93):
        run.update(step, {})
    # 8 · 3 s, 7 · 3.5 s.
    assert [m.partition("left ")[2] for m in caplog.messages] == [
        "",
        "0:00:24",
        "0:00:24",
    ]


def test_terminal_shows_one_line_with_step_metrics_and_phase():
    console = terminal()
    with RunProgress(console=console) as run:
        run.begin(10, 3)
        run.phase("generate")
        run.update(4, METRICS)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    last = [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]
    assert (
        "step 4/10" in last
        and "reward 0.500" in last
        and "left 0:00:12" in last
        and "generate" in last
    )


def test_log_lines_do_not_tear_the_live_line(root_logging):
    console = terminal()
    setup_logging(console=console)
    with RunProgress(console=console) as run:
        run.begin(2)
        run.update(1, METRICS)
        logging.getLogger("rlinf_vl.somewhere").info("weights are here [0]")
    text = console.file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain)]
    (logged,) = [line for line in lines if "weights are here [0]" in line]
    assert "step 1/2" not in logged  # a line of its own
    # Above the live one.
    assert lines.index(logged) < max(i for i, line in enumerate(lines) if "step 1/2" in line)


def test_setup_logging_on_no_terminal_is_plain_and_idempotent(root_logging):
    output = io.StringIO()
    for _ in range(2):
        setup_logging(console=Console(file=output))
    logging.getLogger("rlinf_vl.x").info("hello")
    logging.getLogger("rlinf_vl.x").debug("hidden")
    logging.getLogger("another.library").info("hidden")
    assert re.fullmatch(r"[\d\-]+ [\d:,]+ INFO rlinf_vl.x: hello\n", output.getvalue())
