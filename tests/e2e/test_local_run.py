"""Whole runs in one process, without Ray: their numbers, their checkpoints, and a debugger in them."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from whole_run import comparable, rows_of

pytestmark = pytest.mark.e2e

SMALL = [
    "runner.max_steps=4",
    "runner.save_interval=2",
    "runner.val_check_interval=2",
    "data.val_samples=16",
    "data.rollout_batch_size=6",
    "algorithm.group_size=4",
]
ON_RAY = ["cluster.component_placement={actor: 0, rollout: 0}"]
LOCAL = ["cluster.backend=local"]


def train(folder: Path, *overrides: str) -> Path:
    """Train by the command line; the run's folder."""
    command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", *SMALL, *overrides]
    done = subprocess.run(
        [*command, f"runner.output_dir={folder}"],
        capture_output=True,
        text=True,
        timeout=800,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "toy-grpo-cpu"


def numbers(run: Path) -> dict[int, dict]:
    """The metrics by step; bytes in Ray's object store aside, which a local run has not."""
    return {
        step: {k: v for k, v in row.items() if k != "data/object_store_bytes"}
        for step, row in comparable(run).items()
    }


def trajectories(run: Path) -> pd.DataFrame:
    table = pd.read_parquet(run / "trajectories")
    columns = ["step", "split", "group_id", "sample", "response", "reward", "advantage"]
    ordered = table[columns].sort_values(["step", "split", "group_id", "sample"])
    return ordered.reset_index(drop=True)


#: As in a notebook, whose cells run inside an event loop.
NOTEBOOK = """
import asyncio, sys
import rlinf_vl

async def cell():
    return rlinf_vl.train("toy-grpo-cpu", sys.argv[1:])

run = asyncio.run(cell())
assert run.state == "done" and len(run.metrics) == 5, run.state
assert run.model_path.is_dir()
loaded = [name for name in sys.modules if name.split(".")[0] == "ray"]
assert not loaded, loaded
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    command = [sys.executable, "-c", NOTEBOOK, *SMALL, *LOCAL, f"runner.output_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "toy-grpo-cpu"


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("ray"), *ON_RAY)


def test_a_local_run_has_the_files_of_a_run(local):
    names = {path.name for path in local.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "ledger.jsonl", "report.html", "trajectories"} <= names
    assert {"status.json", "spans", "checkpoints", "tensorboard"} <= names
    assert sorted(path.name for path in (local / "checkpoints").iterdir()) == [
        "global_step_2",
        "global_step_4",
    ]
    assert json.loads((local / "status.json").read_text())["state"] == "done"


def test_numbers_are_those_of_ray_to_the_digit(local, on_ray):
    assert numbers(local) == numbers(on_ray)
    assert rows_of(local / "ledger.jsonl") == rows_of(on_ray / "ledger.jsonl")
    pd.testing.assert_frame_equal(trajectories(local), trajectories(on_ray), check_exact=True)


def test_an_evaluation_without_ray_finds_the_accuracy_of_the_runs_end(local, tmp_path):
    program = (
        "import sys; from rlinf_vl.__main__ import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'ray' in sys.modules)"
    )
    arguments = [f"checkpoint={local}", "data.val_samples=16", f"runner.output_dir={tmp_path}"]
    command = [sys.executable, "-c", program, "eval", "toy-grpo-cpu", *LOCAL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "toy-grpo-cpu-step_4-eval/eval.json").read_text())
    assert found["pass@1"]["mean"] == pytest.approx(numbers(local)[4]["val/accuracy"])


@pytest.mark.parametrize("resumed_on", [ON_RAY, LOCAL], ids=["ray", "local"])
def test_a_checkpoint_resumes_on_the_other_backend(local, on_ray, resumed_on, tmp_path):
    source = on_ray if resumed_on is LOCAL else local
    checkpoint = source / "checkpoints/global_step_2"
    resumed = numbers(train(tmp_path, *resumed_on, f"runner.resume_dir={checkpoint}"))
    whole = numbers(local)
    assert {step: resumed[step] for step in (3, 4)} == {step: whole[step] for step in (3, 4)}


REWARD = """
stopped = False


def stops(response, answer):
    global stopped
    if not stopped:
        stopped = True
        breakpoint()
    return float(answer in response)
"""
ENVIRONMENT = """
from rlinf_vl.envs import StepResult

stopped = False


class Stops:
    def __init__(self):
        pass

    def start(self, problem):
        return list(problem.messages)

    def step(self, response):
        global stopped
        if not stopped:
            stopped = True
            breakpoint()
        return StepResult([], 1.0, True)

    def close(self):
        pass
"""
LOSS = """
stopped = False


def stops(logprobs, old_logprobs, advantages, segment_ids, clip_low, clip_high):
    global stopped
    if not stopped:
        stopped = True
        breakpoint()
    return -advantages * (logprobs - old_logprobs).exp()
"""


class Terminal:
    """A run at a terminal of its own."""

    def __init__(self, *overrides: str) -> None:
        self.text = ""
        self._seen = 0  # where the text ends that was last waited for
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", *SMALL, *LOCAL]
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command, *overrides],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(theirs)

    def until(self, text: str, seconds: float = 200) -> None:
        """Read until the terminal shows a text behind the one that was last waited for."""
        deadline = time.monotonic() + seconds
        while text not in self.text[self._seen :]:
            assert time.monotonic() < deadline, self.text
            if select.select([self._ours], [], [], 1)[0]:
                try:
                    self.text += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:  # the process has ended
                    assert text in self.text[self._seen :], self.text
        self._seen = self.text.index(text, self._seen) + len(text)

    def send(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def finish(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + 200
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            if select.select([self._ours], [], [], 1)[0]:
                try:
                    self.text += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(timeout=100)

    def close(self) -> None:
        self.process.kill()
        os.close(self._ours)


@contextmanager
def stopped_at_breakpoint(*overrides: str) -> Iterator[Terminal]:
    """A run whose code has a breakpoint, when it has reached that and has printed a variable."""
    terminal = Terminal(*overrides)
    try:
        terminal.until("(Pdb)")
        terminal.send("p 'stopped' in globals(), 6 * 7\n")
        terminal.until("(True, 42)")
        terminal.until("(Pdb)")
        yield terminal
    finally:
        terminal.close()


def test_a_breakpoint_in_a_reward_and_an_interrupt_there(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = [
        f"reward.functions=[{{function: {tmp_path}/reward.py:stops}}]",
        f"runner.output_dir={tmp_path}",
        "runner.val_check_interval=-1",
    ]
    with stopped_at_breakpoint(*overrides) as terminal:
        terminal.send("\x03")
        terminal.until("the run will stop with a checkpoint")
        terminal.send("c\n")
        assert terminal.finish() == 128 + signal.SIGINT, terminal.text
    events = rows_of(tmp_path / "toy-grpo-cpu/events.jsonl")
    assert [row["kind"] for row in events][-1] == "interrupted"
    status = json.loads((tmp_path / "toy-grpo-cpu/status.json").read_text())
    assert status["state"] == "stopped"


def test_a_breakpoint_in_an_environment_that_is_quit(tmp_path):
    (tmp_path / "stops.py").write_text(ENVIRONMENT)
    overrides = [f"rollout.env_class={tmp_path}/stops.py:Stops", f"runner.output_dir={tmp_path}"]
    with stopped_at_breakpoint(*overrides) as terminal:
        terminal.send("q\n")
        assert terminal.finish() != 0, terminal.text


def test_a_breakpoint_in_a_loss(tmp_path):
    (tmp_path / "loss.py").write_text(LOSS)
    overrides = [
        f"algorithm.loss_type={tmp_path}/loss.py:stops",
        f"runner.output_dir={tmp_path}",
        "runner.max_steps=1",
    ]
    with stopped_at_breakpoint(*overrides) as terminal:
        terminal.send("c\n")
        assert terminal.finish() == 0, terminal.text
    assert [row["step"] for row in rows_of(tmp_path / "toy-grpo-cpu/metrics.jsonl")][-1] == 1
