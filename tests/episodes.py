"""Episodes for tests and benchmarks on any engine: environments by a seed, good and bad ones, and their groups."""

import asyncio
import io
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from rlinf_vl.envs import StepResult
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.player import Player
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import RequestBuilder, ThoughtBudget
from rlinf_vl.types import Group, ImageRef, Problem, SamplingParams

EMPTY = Problem("p:0", (), "")


def picture(height=48, width=48, seed=0):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def encoded(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return ImageRef.of(buffer.getvalue())


def message_of(*parts, role="user"):
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": role, "content": content}


class Maker:
    """As an `EnvMaker`, without a name to look up; `make` gets the seed."""

    def __init__(self, make: Callable[[int], object]) -> None:
        self.make = make

    def __call__(self, problem, seed, group_seed):
        return self.make(seed)

    def name_of(self, problem):
        return "scripted"


def make_player(
    engine,
    processor,
    make_env,
    *,
    seq_length,
    max_prompt_length,
    overlong="drop",
    alive_timeout_s=30.0,
    thought_tokens=None,
    score_answers=None,
    **settings,
) -> Player:
    """A player of these parts; `settings` are those of `EpisodeSettings`."""
    renderer = Renderer(processor)
    budget = ThoughtBudget(renderer, thought_tokens) if thought_tokens else None
    return Player(
        GenerationClient(engine, renderer, alive_timeout_s, budget),
        RequestBuilder(renderer, seq_length, max_prompt_length, overlong),
        make_env,
        EpisodeSettings(**settings),
        score_answers,
    )


def play(
    player: Player,
    groups: Sequence[Sequence[int]],
    sampling: SamplingParams,
    problem: Problem = EMPTY,
) -> list[Group]:
    """The groups of these seeds, all at once."""

    async def one(number, seeds):
        group = await player.start_group(problem, seeds, sampling)
        player.submit_first_requests([group])
        return await player.play_group(f"g{number}", group)

    async def together():
        return await asyncio.gather(*(one(number, seeds) for number, seeds in enumerate(groups)))

    return asyncio.run(together())


class Talk:
    """A conversation of 1 to 6 turns with 0 to 3 pictures each, all drawn from the seed; some answers are tool errors."""

    def __init__(self, seed: int, turns: int = 6, images: int = 3) -> None:
        self.random = random.Random(seed)
        self.images = images
        self.left = self.random.randint(1, turns)
        self.open = True

    def start(self, problem):
        return [*problem.messages, *self.say()]

    def step(self, response):
        assert self.open and self.left > 0
        self.left -= 1
        if self.left == 0:
            return StepResult((), self.random.random(), True)
        reward, error = self.random.random(), self.random.random() < 0.3
        return StepResult(
            [message_of("error: no such tool", role="tool")] if error else self.say(), reward, False
        )

    def say(self):
        """Texts and pictures in any order."""
        draw, sizes = self.random, (32, 48, 64, 96)
        shown = [
            picture(draw.choice(sizes), draw.choice(sizes), draw.randint(0, 3))
            for _ in range(self.images + 1)
        ]
        parts = [
            *draw.choices(("What", "x = 3"), k=draw.randint(1, 2)),
            *shown[: draw.randint(0, self.images)],
        ]
        draw.shuffle(parts)
        return [message_of(*parts)]

    def close(self):
        self.open = False


class Faulty(Talk):
    """Of 20 seeds in a row one crashes, one hangs and one sends a broken picture, in its first or a later call."""

    def __init__(self, seed: int, hang_s: float, turns: int = 3) -> None:
        super().__init__(seed, turns, images=1)
        self.left = turns
        self.hang_s = hang_s
        self.fault = {0: "crash", 1: "hang", 2: "picture"}.get(seed % 20)
        self.when = seed // 20 % turns

    def say(self):
        self.when -= 1
        if self.when == -1 and self.fault == "crash":
            raise RuntimeError("crashed")
        if self.when == -1 and self.fault == "hang":
            time.sleep(self.hang_s)
        if self.when == -1 and self.fault == "picture":
            return [message_of("look", encoded(picture(64, 64)).data[:-400])]
        return super().say()

    def step(self, response):
        self.left -= 1
        observation = self.say() if self.left else ()
        return StepResult(observation, 1.0, self.left == 0)


class AsyncFaulty(Faulty):
    """The same with coroutine functions."""

    async def start(self, problem):
        return await self.wait(super().start, problem)

    async def step(self, response):
        return await self.wait(super().step, response)

    async def wait(self, call, argument):
        if self.fault == "hang" and self.when == 0:
            await asyncio.sleep(self.hang_s)
        return call(argument)

    async def close(self):
        self.open = False
