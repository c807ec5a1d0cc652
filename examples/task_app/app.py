"""A task app: the server's side of `rollout.env_class: remote` and of `rollout.agent.app`, with a task to look at. Runs without
rlinf_vl. In the first the run asks for each turn; in the second the app calls the policy, and keeps its own loop.

    TASK_APP_TOKEN=secret uvicorn app:app --host 0.0.0.0 --port 8000

Replace `CountShapes` by a task of your own; everything below it is the protocol, which docs/remote.md describes.
"""

import asyncio
import base64
import io
import json
import os
import random
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import openai
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from PIL import Image, ImageDraw
from pydantic import BaseModel

Part = str | Image.Image


@dataclass
class Reply:
    """What a task says next: texts and pictures, which become one user message; and what the last response was worth."""

    parts: list[Part]
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """One episode. Nothing but its arguments may decide the start: the episodes of a group share `group_seed`."""

    def start(self) -> Reply: ...

    def step(self, response: str) -> Reply: ...


# --- the task ---------------------------------------------------------------------------------------------------------

COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 119, 180),
    "orange": (255, 127, 14),
}
SIDE, CELLS, TRIES = 224, 5, 3


class CountShapes:
    """Discs and squares in four colors: how many are there of one kind? After a wrong answer all others are shown paler."""

    def __init__(self, group_seed: int, reward_max: float, reward_min: float, **_: Any) -> None:
        rng = random.Random(group_seed)
        self.rewards = (reward_min, reward_max)
        cells = rng.sample([(x, y) for x in range(CELLS) for y in range(CELLS)], rng.randint(8, 16))
        kinds = [(color, shape) for color in COLORS for shape in ("disc", "square")]
        self.asked = rng.choice(kinds)
        few = [self.asked, *rng.sample(kinds, 3)]
        self.shapes = [(cell, rng.choice(few)) for cell in cells]
        self.answer = sum(kind == self.asked for _, kind in self.shapes)
        self.tries = 0

    def start(self) -> Reply:
        color, shape = self.asked
        question = f"How many {color} {shape}s are there? Think briefly, then put the number within \\boxed{{}}."
        return Reply([self.picture(), question])

    def step(self, response: str) -> Reply:
        boxes = re.findall(r"\\boxed\{\s*(\d{1,4})\s*\}", response)
        info = {
            "state": f"try {self.tries}",
            "correct": bool(boxes) and int(boxes[-1]) == self.answer,
        }
        self.tries += 1
        info["metrics"] = {"tries": self.tries}
        low, high = self.rewards
        if info["correct"]:  # a later try pays less
            return Reply([], low + (high - low) / self.tries, True, info)
        if self.tries == TRIES:
            return Reply([], low, True, info)
        said = (
            f"It is not {boxes[-1]}. The others are paler now."
            if boxes
            else "Put the number within \\boxed{}."
        )
        return Reply([self.picture(), said], info=info)

    def picture(self) -> Image.Image:
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw, size = ImageDraw.Draw(image), SIDE // CELLS
        for (x, y), kind in self.shapes:
            shown = 1.0 if kind == self.asked else 1 - self.tries / TRIES
            color = tuple(round(255 - shown * (255 - c)) for c in COLORS[kind[0]])
            box = (x * size + 6, y * size + 6, (x + 1) * size - 6, (y + 1) * size - 6)
            (draw.ellipse if kind[1] == "disc" else draw.rectangle)(box, fill=color)
        return image


# --- the protocol -----------------------------------------------------------------------------------------------------


class Problem(BaseModel):
    """The row of the data set. Its images are data URIs in the messages."""

    id: str
    answer: str
    messages: list[dict[str, Any]]
    columns: dict[str, Any]


class Start(BaseModel):
    id: str
    problem: Problem
    seed: int
    group_seed: int
    reward_max: float
    reward_min: float


class Step(BaseModel):
    id: str
    turn: int
    response: str


class Close(BaseModel):
    id: str


class Rollout(Start):
    """A whole trajectory (protocol 2): `base_url` and `api_key` are those of an OpenAI client that asks the policy."""

    base_url: str
    api_key: str
    timeout: float


@dataclass
class Episode:
    """What was replied to each request, so that one which is sent again gets the same."""

    task: Task
    first: Reply
    steps: list[tuple[str, Reply]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    used: float = field(default_factory=time.monotonic)


def make_app(
    make_task: Callable[..., Task],
    *,
    name: str,
    token: str | None,
    most_episodes: int = 10_000,
    idle_s: float = 3600,
) -> FastAPI:
    """An app that keeps its episodes in this process: run one worker. Those that nobody asked for in `idle_s` are dropped, and
    the oldest ones beyond `most_episodes`."""
    episodes: OrderedDict[str, Episode] = OrderedDict()
    lock = threading.Lock()

    def allowed(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if token and not secrets.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or no bearer token")

    app = FastAPI(title=name)
    guarded = [Depends(allowed)]

    # By id: a request that is sent again waits for the same trajectory.
    rollouts: OrderedDict[str, asyncio.Task] = OrderedDict()

    @app.post("/rollout", dependencies=guarded)
    async def rollout(body: Rollout) -> dict[str, Any]:
        if body.id not in rollouts:
            task = make_task(**body.model_dump(exclude={"id", "base_url", "api_key", "timeout"}))
            rollouts[body.id] = asyncio.ensure_future(
                play(task, body.base_url, body.api_key, body.timeout)
            )
            while len(rollouts) > most_episodes:
                rollouts.popitem(last=False)
        return await asyncio.shield(rollouts[body.id])

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/info", dependencies=guarded)
    def info() -> dict[str, Any]:
        return {"protocol": 1, "protocols": [1, 2], "name": name, "episodes": len(episodes)}

    @app.post("/start", dependencies=guarded)
    def start(body: Start, request: Request) -> Response:
        with lock:
            if body.id not in episodes:
                task = make_task(**body.model_dump(exclude={"id"}))
                episodes[body.id] = Episode(task, task.start())
            episodes.move_to_end(body.id)
            episodes[body.id].used = time.monotonic()
            while (
                len(episodes) > most_episodes
                or time.monotonic() - next(iter(episodes.values())).used > idle_s
            ):
                episodes.popitem(last=False)
            return encoded(episodes[body.id].first, request)

    @app.post("/step", dependencies=guarded)
    def step(body: Step, request: Request) -> Response:
        with lock:
            episode = episodes.get(body.id)
            if episode is None:
                raise HTTPException(404, "no such episode")
            episodes.move_to_end(body.id)
            episode.used = time.monotonic()
        with episode.lock:  # a request that is sent again may come while the first one is at work
            done = bool(episode.steps) and episode.steps[-1][1].done
            if body.turn == len(episode.steps) and not done:
                episode.steps.append((body.response, episode.task.step(body.response)))
            elif (
                not 0 <= body.turn < len(episode.steps)
                or episode.steps[body.turn][0] != body.response
            ):
                over = ", and the episode is over" if done else ""
                raise HTTPException(
                    409,
                    f"turn {body.turn} with this response does not follow {len(episode.steps)} turns{over}",
                )
            return encoded(episode.steps[body.turn][1], request)

    @app.post("/close", dependencies=guarded)
    def close(body: Close) -> dict[str, str]:
        with lock:
            episodes.pop(body.id, None)
        return {}

    return app


async def play(task: Task, base_url: str, api_key: str, timeout: float) -> dict[str, Any]:
    """Play a trajectory: the loop that is yours to change. Nothing but calls of the policy is trained on."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout) as client:
        reply = task.start()
        messages, reward = [user_message(reply)], 0.0
        while not reply.done:
            completion = await client.chat.completions.create(model="policy", messages=messages)
            text = completion.choices[0].message.content
            reply = await asyncio.to_thread(task.step, text)
            reward += reply.reward
            messages += [{"role": "assistant", "content": text}, user_message(reply)]
    return {"reward": reward, "info": reply.info}


def user_message(reply: Reply) -> dict[str, Any]:
    """A reply as a message of the user, with pictures as data URIs."""
    content: list[dict[str, Any]] = []
    for part in reply.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        content.append({"type": "image_url", "image_url": {"url": data_uri(png(part))}})
    return {"role": "user", "content": content}


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def encoded(reply: Reply, request: Request) -> Response:
    """JSON with pictures as data URIs; or, where the client takes it, multipart with pictures as they are."""
    multipart = "multipart/" in request.headers.get("accept", "")
    pictures: list[bytes] = []
    content: list[dict[str, Any]] = []
    for part in reply.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        pictures.append(png(part))
        url = f"cid:{len(pictures)}" if multipart else data_uri(pictures[-1])
        content.append({"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": content}] if content else []
    said = json.dumps(
        {"messages": messages, "reward": reply.reward, "done": reply.done, "info": reply.info}
    )
    if not multipart:
        return Response(said, media_type="application/json")
    boundary = secrets.token_hex(16)
    named = [("reply", "application/json", said.encode())]
    named += [(str(n), "image/png", picture) for n, picture in enumerate(pictures, 1)]
    body = b"".join(
        f"--{boundary}\r\nContent-ID: <{name}>\r\nContent-Type: {kind}\r\n\r\n".encode()
        + data
        + b"\r\n"
        for name, kind, data in named
    )
    return Response(
        body + f"--{boundary}--\r\n".encode(), media_type=f"multipart/related; boundary={boundary}"
    )


app = make_app(CountShapes, name="count-shapes", token=os.environ.get("TASK_APP_TOKEN"))
