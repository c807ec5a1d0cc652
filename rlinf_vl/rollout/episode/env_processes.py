"""Environments in processes beside the worker (`rollout.env_processes`).

The engine's Python then does not wait for theirs, and an environment that crashes, or holds its
interpreter for ever, ends the episodes of its process and nothing else.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vl.config.schema import Config
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.envs import Env, EnvMaker, StepResult
from rlinf_vl.envs.call_forms import ReplyForm
from rlinf_vl.envs.registry import SINGLE
from rlinf_vl.rollout.episode.env_executor import EnvHandle, ThreadExecutor
from rlinf_vl.rollout.episode.env_makers import env_maker_of
from rlinf_vl.rollout.episode.loop_bridge import wait_done
from rlinf_vl.rollout.episode.observation import image_of_array, portable_result
from rlinf_vl.rollout.episode.user_process import ProcessDied, UserProcess, UserProcessPool
from rlinf_vl.types import Message, Problem

_numbers = itertools.count()


class ProcessEnvMaker:
    """An `EnvMaker` whose environments live in processes, but for `single_turn`, which never blocks."""

    def __init__(self, config: Config, make_env: EnvMaker, timeout_s: float) -> None:
        """`timeout_s` limits a call of an environment."""
        self._make_env = make_env
        self._pool = UserProcessPool(
            partial(EnvHost, config, timeout_s, make_env.reply_form),
            timeout_s,
            config.rollout.env_processes,
        )

    def __call__(self, problem: Problem, seed: int, group_seed: int) -> Env:
        if self.name_of(problem) == SINGLE:
            return self._make_env(problem, seed, group_seed)
        return ProcessEnv(self._pool, seed, group_seed)

    def name_of(self, problem: Problem) -> str:
        """Return the name of the problem's environment."""
        return self._make_env.name_of(problem)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class ProcessEnv:
    """An environment in another process, an `Env`.

    Attributes:
        start_limit_s: limit on the start of the process.
    """

    def __init__(self, pool: UserProcessPool, seed: int, group_seed: int) -> None:
        self._pool, self._seeds = pool, (seed, group_seed)
        self.start_limit_s = pool.start_limit_s
        self._number = next(_numbers)
        self._process: UserProcess | None = None

    async def wait_for_process(self) -> None:
        """Wait for a process, which may have to start."""
        # An environment stays where it was started: its state is there.
        self._process = await self._pool.acquire()

    async def start(self, problem: Problem) -> Sequence[Message]:
        if self._process is None:
            await self.wait_for_process()
        assert self._process is not None
        return await self._process.call("start", self._number, problem, *self._seeds)

    async def step(self, response: str) -> StepResult:
        assert self._process is not None
        return await self._process.call("step", self._number, response)

    async def close(self) -> None:
        # Taken away first: it is closed once, however often and by whom it is asked for.
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await process.call("close", self._number)
        except ProcessDied:
            pass  # and the environment with it
        finally:
            self._pool.release(process)


class EnvHost:
    """In its process: holds environments by number, and calls them."""

    def __init__(
        self, config: Config, timeout_s: float, reply_form: ReplyForm | None = None
    ) -> None:
        self._executor = ThreadExecutor(timeout_s)
        self._make_env = env_maker_of(config, reply_form=reply_form)
        self._envs: dict[int, EnvHandle] = {}

    @property
    def hung(self) -> int:
        return self._executor.hung

    async def start(
        self, number: int, problem: Problem, seed: int, group_seed: int
    ) -> Sequence[Message]:
        env = self._envs[number] = EnvHandle(self._executor)
        await env.make(lambda: self._make_env(problem, seed, group_seed))
        return await env.call("start", problem, _encoded)

    async def step(self, number: int, response: str) -> StepResult:
        return await self._envs[number].call("step", response, _encoded_result)

    async def close(self, number: int) -> None:
        # Closed before it was started, or with its process: there is nothing to close.
        env = self._envs.pop(number, None)
        if env is not None:
            await wait_done(env.close(), self._executor.timeout_s)


def _encoded_result(result: StepResult) -> StepResult:
    # Its own `info`, too, may hold objects of classes that the worker does not know.
    return replace(portable_result(result), messages=_encoded(result.messages))


def _encoded(messages: Iterable[Message]) -> list[Message]:
    """Return messages whose pictures are encoded: that takes longer than to send them."""
    return [_encoded_part(message) for message in messages]


def _encoded_part(part: Any) -> Any:
    if isinstance(part, str):
        return str.__str__(part)  # of a subclass, too
    if isinstance(part, dict):
        return {name: _encoded_part(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_encoded_part(value) for value in part]
    if isinstance(part, np.ndarray) and part.ndim == 4:  # the frames of a video
        return [_encoded_part(frame) for frame in part]
    if isinstance(part, np.ndarray):
        return bytes(image_of_array(part).data)
    if isinstance(part, Image.Image):
        return bytes(to_image_ref(part, root=None).data)
    return part
