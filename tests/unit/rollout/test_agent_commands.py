"""Agents as commands: real processes, good and bad ones, against the endpoint."""

import gc
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from agent_groups import play
from scripted_engine import Scripted

from rlinf_vl.extras.agents.command_guard import sweep_ended
from rlinf_vl.extras.agents.drivers import MARK, CommandDriver
from rlinf_vl.extras.agents.player import AgentPlayer
from rlinf_vl.extras.agents.session import AgentLimits
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import SamplingParams

COMMAND = [sys.executable, "-S", str(Path(__file__).parents[2] / "command_agent.py")]


@pytest.fixture(scope="module")
def processor(toy_folder):
    return Processor(toy_folder, family_of("qwen3_vl"))


def player_of(processor, *, command=COMMAND, timeout_s=60.0, max_concurrent=16):
    client = GenerationClient(Scripted(processor, ["18"]), Renderer(processor), 30.0)
    driver = CommandDriver(command, timeout_s, memory_gb=0.5)
    settings = EpisodeSettings(max_concurrent=max_concurrent)
    return AgentPlayer(client, settings, driver, AgentLimits(200, 10**6), (0.0, 1.0))


def outcome(monkeypatch, processor, kinds, seeds, **options):
    """The trajectories of these seeds; nothing is left behind."""
    monkeypatch.setenv("AGENT_KINDS", ",".join(kinds))
    sampling = SamplingParams(max_new_tokens=20, stop_ids=processor.stop_ids)
    folders = set(Path("/tmp").glob("rlinf-agent-*"))
    player = player_of(processor, **options)
    groups = play(player, [seeds[i : i + 8] for i in range(0, len(seeds), 8)], sampling)
    marked = []
    for process in psutil.process_iter():
        try:
            marked += [process] if MARK in process.environ() else []
        except psutil.Error:
            continue
    assert marked == [] and set(Path("/tmp").glob("rlinf-agent-*")) <= folders
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_a_command_gets_its_task_and_returns_its_result(monkeypatch, processor):
    for trajectory in outcome(monkeypatch, processor, ["good"], [1, 2]):
        assert trajectory.error is None and trajectory.reward == 0.75
        # The result's own reward is that of the last call.
        assert trajectory.turn_rewards == (0.0, 0.75) and trajectory.correct is False
        assert trajectory.metrics["n"] == 2 and trajectory.metrics["agent/calls"] == 2
        assert len(trajectory.sequences) == 1


def test_no_proxy_stands_between_a_command_and_its_endpoint(monkeypatch, processor):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert [t.error for t in outcome(monkeypatch, processor, ["good"], [1])] == [None]


FAULTS = {
    "crash": "ended with exit code 3",
    "write": "wrote more than 1048576 bytes of output",
    "memory": "GiB, and rollout.agent.memory_gb is 0.5",
    "child memory": "GiB, and rollout.agent.memory_gb is 0.5",
    "segfault": "was ended by SIGSEGV",
    "no result": "wrote 'not JSON' as its result",
    "flood": "the endpoint refused its first call: the request is larger than",
    "loop": "ended with exit code 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_command_is_an_error_of_its_trajectory(monkeypatch, processor, kind):
    trajectories = outcome(monkeypatch, processor, ["good", kind], [0, 1])
    assert trajectories[0].error is None
    assert FAULTS[kind] in trajectories[1].error


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_with_all_that_it_started(monkeypatch, processor):
    trajectories = outcome(monkeypatch, processor, ["hang", "orphan"], [0, 1], timeout_s=4.0)
    assert "did not end within rollout.agent.timeout=4 s" in trajectories[0].error
    assert trajectories[1].error is None


def test_nothing_is_left_of_a_killed_worker_but_for_the_next_start(tmp_path):
    code = f"""
import asyncio
from rlinf_vl.extras.agents.contract import AgentTask
from rlinf_vl.extras.agents.command_guard import sweep_ended
from rlinf_vl.extras.agents.drivers import CommandDriver
from rlinf_vl.types import Problem
command = ["sh", "-c", "setsid sleep 1000 & echo $! > {tmp_path}/pid; sleep 1000"]
driver = CommandDriver(command, 600.0, 1.0)
asyncio.run(driver.run(AgentTask(Problem("p", (), ""), 0, 0), "http://127.0.0.1:1", "key"))
"""
    folder, mark = tmp_path / "folders", tmp_path / "pid"
    folder.mkdir()
    environment = os.environ | {"TMPDIR": str(folder)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text().endswith("\n")):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    (left,) = folder.iterdir()
    sweep_ended(folder)
    assert left.exists(), "its worker is alive"
    child = psutil.Process(int(mark.read_text()))
    parent.kill()
    parent.wait()
    while list(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    # As if the guard had been killed, too.
    left.mkdir()
    sweep_ended(folder)
    assert not left.exists()


def test_a_command_that_is_not_there(monkeypatch, processor):
    (trajectory,) = outcome(monkeypatch, processor, ["good"], [0], command=["no-such-command"])
    assert "did not start: no-such-command" in trajectory.error


@pytest.mark.slow
def test_two_hundred_agents_of_which_a_fifth_misbehaves(monkeypatch, processor):
    kinds = [*["good"] * 16, "crash", "hang", "loop", "flood"]
    gc.collect()
    open_files = len(os.listdir("/proc/self/fd"))
    trajectories = outcome(
        monkeypatch, processor, kinds, list(range(200)), timeout_s=40.0, max_concurrent=200
    )
    faults = Counter(kinds[i % 20] for i, t in enumerate(trajectories) if t.error is not None)
    assert faults == {"crash": 10, "hang": 10, "loop": 10, "flood": 10}
    assert all(t.reward == 0.75 for t in trajectories if t.error is None)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_files + 10
