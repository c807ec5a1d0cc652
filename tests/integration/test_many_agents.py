"""200 agents in processes of their own, of which some misbehave, behind a proxy that is not there."""

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

from rlinf_vl.extras.agents.function_driver import ProcessFunctionDriver
from rlinf_vl.extras.agents.player import AgentGroup, AgentPlayer
from rlinf_vl.extras.agents.session import AgentCall, AgentLimits, AgentSession
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import ImageRef, SamplingParams

N_AGENTS, MAX_CONCURRENT = 200, 4
GROUPS = [range(first, first + 8) for first in range(0, N_AGENTS, 8)]
#: Seconds that an agent works between its calls, and that a slow module takes to be imported.
WORK_S, IMPORT_S = 0.25, 0.5
#: Seconds that an agent may take; the import of its file takes longer.
TIMEOUT_S, START_S = 5.0, 5.5
#: Of twenty agents each; one in forty returns an object that is no result.
KINDS = {3: "refused", 8: "own result", 12: "slow import", 28: "no result"}
KINDS |= {seed + 20: kind for seed, kind in KINDS.items() if seed in (3, 12)}
AGENTS = """
import asyncio, base64, importlib, io, os, time
from pathlib import Path
from PIL import Image
from rlinf_vl.extras.agents import AgentResult

time.sleep(float(os.environ["START_S"]))


class Number(float):
    pass


class Result(AgentResult):
    pass


class Verdict:
    reward = 0.5


async def solve(task, client):
    Path(__file__).with_name("begun").touch()
    kind = KINDS.get(task.seed % 40)
    if kind == "slow import":
        importlib.import_module(f"slow_{task.seed}")
    data = io.BytesIO()
    Image.new("RGB", (32, 48), (task.seed, 0, 99)).save(data, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    question = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What"}]
    messages = [{"role": "user", "content": question}]
    try:
        for n in (2 if kind == "refused" else 1, 1):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, n=n
            )
            messages.append(completion.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "And now"})
            await asyncio.sleep(WORK_S / 2)
    except Exception:
        await asyncio.sleep(WORK_S)
        raise
    if kind == "own result":
        return Result(Number(0.5), metrics={"n": Number(1)})
    return Verdict() if kind == "no result" else 0.5
"""
WORKER = """
import sys
from test_many_agents import play_all
play_all(sys.argv[1], sys.argv[2])
"""


class Timed(Scripted):
    """A scripted engine; `first_time` is when it was first asked."""

    first_time = 0.0

    def submit(self, requests):
        self.first_time = self.first_time or time.monotonic()
        return super().submit(requests)


def play_all(toy_folder, folder):
    """Play all agents; returns the trajectories, the engine's prompts and the seconds from its first one."""
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    engine = Timed(processor, ["18"])
    player = AgentPlayer(
        GenerationClient(engine, Renderer(processor), 30.0),
        EpisodeSettings(max_concurrent=MAX_CONCURRENT),
        ProcessFunctionDriver(f"{folder}/agents.py:solve", {}, TIMEOUT_S, 2),
        AgentLimits(8, 10**5),
        (0.0, 1.0),
    )
    sampling = SamplingParams(max_new_tokens=20, stop_ids=processor.stop_ids)
    groups = play(player, GROUPS, sampling)
    elapsed_s = time.monotonic() - engine.first_time
    n_prompts = sum(len(request.seeds) for request in engine.requests)
    return [t for group in groups for t in group.trajectories], n_prompts, elapsed_s


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the agents' files, in an environment with a proxy that refuses connections."""
    text = f"KINDS, WORK_S = {KINDS}, {WORK_S}\n{AGENTS}"
    (tmp_path / "agents.py").write_text(text)
    for seed in range(N_AGENTS):
        if KINDS.get(seed % 40) == "slow import":
            (tmp_path / f"slow_{seed}.py").write_text(f"import time\ntime.sleep({IMPORT_S})\n")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path}:{Path(__file__).parent}:{Path(__file__).parents[1]}"
    )
    monkeypatch.setenv("START_S", str(START_S))
    return tmp_path


def count_objects():
    """Count the objects in memory that belong to agents."""
    gc.collect()
    kinds = (AgentSession, AgentCall, AgentGroup, RolloutState, ImageRef)
    return Counter(type(value).__name__ for value in gc.get_objects() if type(value) in kinds)


def test_two_hundred_agents_are_all_accounted_for(toy_folder, folder):
    before = count_objects()
    open_files, children = len(os.listdir("/proc/self/fd")), psutil.Process().children()
    trajectories, n_prompts, elapsed_s = play_all(toy_folder, folder)

    faults = Counter()
    for seed, trajectory in enumerate(trajectories):
        kind = KINDS.get(seed % 40)
        if trajectory.error is None:
            assert trajectory.reward == 0.5 and len(trajectory.turns) == 2
        elif kind == "refused":
            assert "the endpoint refused its first call: n: 2" in trajectory.error
        elif kind == "no result":
            assert "it returned Verdict; return a number" in trajectory.error
        faults[kind] += trajectory.error is not None
    assert len(trajectories) == N_AGENTS
    assert +faults == {"refused": 10, "no result": 5}
    assert n_prompts == 2 * (N_AGENTS - 10)
    ideal_s = (N_AGENTS * WORK_S + 10 * IMPORT_S) / MAX_CONCURRENT
    print(f"{elapsed_s:.1f} s, {elapsed_s / ideal_s:.2f} of the ideal")
    assert elapsed_s < 2 * ideal_s

    assert (count_objects() - before)["ImageRef"] > N_AGENTS / 2, "images of trajectories"
    del trajectories, trajectory
    assert count_objects() - before == {}
    assert psutil.Process().children() == children
    assert len(os.listdir("/proc/self/fd")) <= open_files + 10


def is_alive(process):
    """One that is gone, and that this container's first process has not reaped, is a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.nightly
def test_nothing_is_left_of_a_worker_that_is_killed(toy_folder, folder, monkeypatch):
    monkeypatch.setenv("START_S", "0")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(toy_folder), str(folder)])
    try:
        while not (folder / "begun").exists():
            assert worker.poll() is None
            time.sleep(0.05)
        processes = psutil.Process(worker.pid).children(recursive=True)
        assert len(processes) == 2
    finally:
        worker.kill()
        worker.wait()
    deadline = time.monotonic() + 10.0
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
