"""`openenv:ADDRESS`: with a client class in a file, and with OpenEnv's own client and server where the package is installed."""

import asyncio
import base64
import io
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.envs import EnvMaker
from rlinf_vl.envs.registry import keyword_problems, load_env_class
from rlinf_vl.rollout.episode.observation import observe
from rlinf_vl.types import Problem

TESTS = Path(__file__).resolve().parents[2]
ROW = Problem(
    "p:0", ({"role": "user", "content": [{"type": "text", "text": "Go $5."}]},), "", columns={"level": 4}
)  # fmt: skip
#: A client that is typed as those that OpenEnv's environments bring.
CLIENT = """
from dataclasses import dataclass
from typing import Generic, TypeVar

Act, Obs = TypeVar("Act"), TypeVar("Obs")

@dataclass
class Move:
    x: int
    y: int = 0

@dataclass
class Seen:
    text: str
    score: float = 0.0
    empty: str = ""
    metadata: dict | None = None

@dataclass
class Result:
    observation: Seen
    reward: float | None = None
    done: bool = False

class Base(Generic[Act, Obs]):
    def __init__(self, base_url, **kwargs): self.calls = [(base_url, kwargs)]

class Client(Base[Move, Seen]):
    async def reset(self, **kwargs):
        return Result(Seen(f"reset {sorted(kwargs.items())}", metadata={"note": {"text": "hi"}}))
    async def step(self, action):
        assert isinstance(action, Move)
        return Result(Seen(f"at {action.x}, {action.y}", 2.5), float(action.x), action.x > 2)
    async def close(self): self.calls.append("close")
"""


@pytest.fixture
def client_file(tmp_path):
    (tmp_path / "shop.py").write_text(CLIENT)
    return f"openenv:{tmp_path}/shop.py:Client"


def made(name, seed=7, **kwargs):
    maker = EnvMaker(name, kwargs, {}, lambda *_: False, 1.0, 0.0)
    maker.check(ROW)
    return maker(ROW, 1, seed)


def texts(messages):
    return "".join(part["text"] for m in messages for part in m["content"] if "text" in part)


def played(env, *responses):
    """The first messages, and the results of these responses."""

    async def play():
        messages = await env.start(ROW)
        try:
            return messages, [await env.step(response) for response in responses]
        finally:
            await env.close()

    return asyncio.run(play())


def test_a_clients_own_class_is_played(client_file):
    options = {"url": "http://127.0.0.1:9", "reset": {"size": 3}, "reset_columns": ["level"]}
    env = made(client_file, **options, prompt="Task: $task", reward_scale=2.0, invalid_reward=-0.5)
    assert load_env_class(client_file, {}) is type(env)
    first, (step, odd, wrong, fenced) = played(
        env, '{"x": 1}', '{"z": 1}', "north", 'So:\n```json\n{"x": 3, "y": 1}\n```'
    )
    assert texts(first) == (
        "Task: Go $5.text: reset [('level', 4), ('seed', 7), ('size', 3)]\nscore: 0.0\n"
    )
    assert (step.reward, step.done) == (2.0, False)
    assert texts(step.messages) == "text: at 1, 0\nscore: 2.5\n"
    for invalid in (odd, wrong):
        assert (invalid.reward, invalid.done) == (-0.5, False)
    assert "unexpected keyword argument 'z'" in texts(odd.messages)
    assert "write one JSON object" in texts(wrong.messages)
    assert (fenced.reward, fenced.done, list(fenced.messages)) == (6.0, True, [])
    assert fenced.info["correct"] is True
    assert fenced.info["metrics"] == {"steps": 2, "invalid_answers": 2, "episode_reward": 4.0}


def test_fields_are_chosen_and_episodes_end(client_file):
    env = made(client_file, url="http://h", fields=["metadata.note.text"], max_episode_steps=1)
    first, (last,) = played(env, "nothing")
    assert texts(first).endswith("hi") and "reset" not in texts(first)
    assert last.done and not last.messages


def test_images_of_every_form_are_shown(client_file):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), (1, 2, 3)).save(buffer, "PNG")
    plain = base64.b64encode(buffer.getvalue()).decode()
    env = made(client_file, url="http://h", image_fields=["pixels"])
    observation = {
        "shot": plain,
        "views": [f"data:image/png;base64,{plain}", plain],
        "pixels": [[[0, 128, 255]] * 4] * 3,
        "note": "/9j/ is no image, and neither is iVBORw0KGgo?",
        "reward": 1.0,
    }
    parts = env._shown(observation)
    assert [part["type"] for part in parts] == ["image"] * 4 + ["text"]
    assert parts[-1]["text"] == observation["note"]
    images = observe([{"role": "user", "content": parts}], ROW).images
    sizes = [Image.open(io.BytesIO(image.data)).size for image in images]
    assert sizes == [(8, 4)] * 3 + [(4, 3)]
    np.testing.assert_array_equal(parts[3]["image"][0, 0], [0, 128, 255])


def test_what_cannot_work_is_refused(client_file):
    cls = load_env_class(client_file, {})
    with pytest.raises(ValueError, match="rollout.env_kwargs.url"):
        cls(group_seed=1)
    with pytest.raises(ValueError, match="must be a list of names"):
        cls(url="http://h", fields="text", group_seed=1)
    assert "did you mean 'fields'" in next(keyword_problems(cls, {"field": []}))
    row = Problem("p:0", (), "", columns={"env_kwargs": {"url": "http://elsewhere"}})
    maker = EnvMaker(client_file, {}, {}, lambda *_: False, 1.0, 0.0)
    with pytest.raises(ValueError, match="rollout.env_kwargs alone"):
        maker.check(row)


@pytest.fixture(scope="module")
def server():
    """The address of a real OpenEnv server, in a process of its own."""
    pytest.importorskip("openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(TESTS / "openenv_toy.py"), str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                # Not a test of speed: imports take long where the machine is busy.
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def test_a_server_is_played_by_openenvs_own_client(server, monkeypatch):
    # Nobody listens there.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "a.org")
    name = f"openenv:{server}"
    options = {"fields": ["picture", "question"], "reset": {"number": 3}}
    first, (wrong, invalid, last) = played(
        made(name, **options), "I don't know", '{"text": "x", "more": 1}', "again"
    )
    (picture, question) = first[0]["content"]
    assert picture["image"].startswith(b"\x89PNG") and question["text"].startswith("What is the")
    assert wrong.reward == pytest.approx(-0.012) and not wrong.done
    assert "fields are refused" in texts(invalid.messages) and invalid.reward == 0.0
    assert last.done and last.reward == pytest.approx(-0.005)
    assert last.info["metrics"]["episode_reward"] == pytest.approx(-0.017)


def test_a_group_shares_its_start_and_a_crash_is_an_error(server):
    name = f"openenv:{server}"
    starts = [played(made(name, seed=seed))[0] for seed in (3, 3, 4)]
    assert starts[0] == starts[1] != starts[2]
    with pytest.raises(RuntimeError, match="the simulator fell over"):
        played(made(name), "crash")


def test_the_schema_tells_the_fields_where_there_is_no_single_one(server):
    env = made(f"openenv:{server}", prompt="Fields: $action\n")
    assert texts(played(env)[0]).startswith('Fields: {"text": {"title": "Text"')
