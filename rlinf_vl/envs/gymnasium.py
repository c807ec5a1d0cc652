"""Any environment that renders `rgb_array`: Gymnasium's registered ones, and older ones made by a function."""

import hashlib
import importlib
import inspect
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from string import Template
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vl.envs.base import StepResult
from rlinf_vl.types import Message, Problem

TEMPLATE = r"""<image>
Answer with one of $actions as in \boxed{$example}.
---
<image>
---
That is none of $actions. Answer as in \boxed{$example}.
"""
#: Seconds that one environment waits for another's start or close.
_PATIENCE_S = 10.0
#: pygame, which many of them draw with, is imported and quit by whoever draws first and closes last: one at a time.
_drawing = Lock()


class Gymnasium:
    """A policy that sees the rendered frames and names an action. Every answer is a step, or is answered as invalid.

    The start is drawn from `group_seed`, what is random afterwards from `seed` (which an environment without Gymnasium's
    `np_random` can't tell apart: there `group_seed` decides both).

    Args:
        id: of `gymnasium.make`; `module:id` imports the module first, which registers it (minigrid:MiniGrid-Empty-5x5-v0).
        make: instead of `id`, `module:callable` that makes an environment with `reset`, `step` and `render`, of Gymnasium's form or
            of that of the old gym (crafter:Env); it gets `seed` if it names that.
        make_kwargs: keywords for either.
        actions: what the policy may name → the action; or a list of names, whose places are the actions. Without it: the names that
            the environment has (`action_names`, or an enum `actions`), or else the numbers of its discrete actions.
        parser: `module:function` from an answer to an action, or None for an invalid answer. Without it: the last \\boxed{…} of an
            answer names the action, or the whole answer does; case doesn't count.
        template: what the policy is told at the start, in each turn and of an invalid answer, separated by lines of `---`. `<image>`
            stands for the frames. $actions: the names; $example: one of them; $task: what the row asks; $reward: of the last step;
            $turn, $left: answers given, and left within `max_episode_steps`; $observation, or each text in it by its name: what
            the environment says in words, such as $mission.
        size: of a shown frame, pixels of its longer side, or [height, width]; None leaves it as it is rendered.
        history: frames shown in each turn, the newest last.
        reward_scale: a step pays the environment's reward times this. `invalid_reward`: what an invalid answer pays.
        max_episode_steps: answers after which an episode ends, invalid ones included; None leaves it to the environment.
        success_above: an episode counts as right if the environment's rewards sum to more than this.
        metrics: names in the environment's `info` to record; of a mapping each number by its name.

    Raises:
        ImportError: a package is missing. ValueError: a keyword can't work.
    """

    config_only = ("make", "parser")  # a row doesn't choose which function is called

    def __init__(
        self,
        id: str = "",
        make: str = "",
        make_kwargs: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | Sequence[str] | None = None,
        parser: str | None = None,
        template: str = TEMPLATE,
        size: int | Sequence[int] | None = None,
        history: int = 1,
        reward_scale: float = 1.0,
        invalid_reward: float = 0.0,
        max_episode_steps: int | None = None,
        success_above: float = 0.0,
        metrics: Sequence[str] = (),
        *,
        seed: int,
        group_seed: int,
    ) -> None:
        if bool(id) == bool(make):
            raise ValueError("give either id (of gymnasium.make) or make (module:callable)")
        if history < 1 or (max_episode_steps is not None and max_episode_steps < 1):
            raise ValueError(f"history={history} and max_episode_steps={max_episode_steps} must be at least 1")
        self._size = [size] if isinstance(size, int) else size
        if self._size and not (len(self._size) <= 2 and all(isinstance(n, int) and 1 <= n <= 8192 for n in self._size)):
            raise ValueError(f"size={size} must be a number of pixels from 1 to 8192, or [height, width]")
        if isinstance(actions, str):
            raise ValueError(f"actions={actions!r} must be a list of names, or a mapping of names to actions")
        self._make = _maker(id, make, dict(make_kwargs or {}), group_seed % 2**31)
        self._parser: Callable[[str], Any] | None = _function(parser) if parser else None
        texts = [
            [Template(piece) for piece in text.strip("\n").split("<image>")]
            for text in re.split(r"^---\s*$", template, flags=re.MULTILINE)
        ]
        if not 2 <= len(texts) <= 3 or not all(piece.is_valid() for text in texts for piece in text):
            raise ValueError(
                "template: write two or three texts (start, turn, invalid answer) between lines of ---; $$ is a $"
            )
        self._start_text, self._turn_text, *rest = texts
        self._invalid_text = rest[0] if rest else self._turn_text
        self._actions = {name: i for i, name in enumerate(actions)} if isinstance(actions, Sequence) else actions
        self._frames: deque[Image.Image] = deque(maxlen=history)
        self._reward_scale, self._invalid_reward, self._success_above = reward_scale, invalid_reward, success_above
        self._most, self._metrics = max_episode_steps, metrics
        self._seed, self._group_seed = seed, group_seed % 2**31
        self._env: Any = None
        self._turns, self._invalid, self._total = 0, 0, 0.0
        self._task, self._said = "", {}
        self._names: dict[str, Any] = {}
        self._state = ""

    def start(self, problem: Problem) -> list[Message]:
        with _alone():
            self._env = self._make()
            takes_seed = "seed" in inspect.signature(self._env.reset).parameters
            begun = self._env.reset(seed=self._group_seed) if takes_seed else self._env.reset()
            bare = getattr(self._env, "unwrapped", self._env)
            if takes_seed and hasattr(bare, "np_random"):
                bare.np_random = np.random.default_rng(self._seed)
            self._look(begun[0] if isinstance(begun, tuple) else begun)
        table = self._actions or _action_names(self._env)
        if not table and self._parser is None:
            raise ValueError(f"{self._env.action_space} is not discrete: give a table of actions, or a parser")
        self._names = {
            str(name).casefold(): np.asarray(action) if isinstance(action, list) else action
            for name, action in table.items()
        }
        self._task = _text_of(problem)
        return [self._message(self._start_text)]

    def step(self, response: str) -> StepResult:
        if self._env is None:
            raise RuntimeError("step() without start(), or after the end")
        self._turns += 1
        state, action, reward, over, info = self._state, self._parse(response), 0.0, False, {}
        if action is None:
            self._invalid += 1
            message, paid = self._invalid_text, self._invalid_reward
        else:
            observed, reward, *ends, info = self._env.step(action)
            reward, over = float(reward), any(ends)  # (terminated, truncated), or the old (done)
            self._total += reward
            self._look(observed)
            message, paid = self._turn_text, reward * self._reward_scale
        done = over or (self._most is not None and self._turns >= self._most)
        metrics = {
            "steps": self._turns - self._invalid,
            "invalid_answers": self._invalid,
            "episode_reward": self._total,
        }
        facts = {
            "correct": self._total > self._success_above,
            "metrics": metrics | dict(_numbers(info, self._metrics)),
            "state": state,
        }
        messages = () if done else (self._message(message, reward),)
        if done:
            self.close()
        return StepResult(messages, paid, done, facts)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None and hasattr(env, "close"):
            with _alone():
                env.close()

    def _parse(self, response: str) -> Any:
        """The action that an answer names; None if it names none."""
        if self._parser is not None:
            return self._parser(response)
        boxed = re.findall(r"\\boxed\{([^{}]*)\}", response)
        return self._names.get((boxed[-1] if boxed else response).strip(" \t\r\n.!'\"`*").casefold())

    def _look(self, observed: Any) -> None:
        """Remember what there is to see, and to read."""
        frame = np.asarray(self._env.render())
        if frame.ndim != 3 or frame.dtype != np.uint8:
            raise ValueError(f"render() gave {frame.dtype} of shape {frame.shape}, not uint8 of [height, width, 3]")
        self._state = hashlib.blake2b(frame.tobytes(), digest_size=12).hexdigest()
        self._frames.append(_resized(Image.fromarray(frame), self._size))
        said = observed if isinstance(observed, Mapping) else {"observation": observed}
        self._said = {name: text for name, text in said.items() if isinstance(text, str)}

    def _message(self, text: list[Template], reward: float = 0.0) -> Message:
        """A template's pieces, with the frames between them. Raises KeyError: it names what isn't there."""
        left = "" if self._most is None else self._most - self._turns
        names = list(self._names)
        facts = {
            "actions": ", ".join(names),
            "example": "".join(names[:1]),
            "task": self._task,
            "reward": f"{reward:g}",
        }
        facts |= {"turn": self._turns, "left": left} | self._said
        parts: list[dict[str, Any]] = []
        for i, piece in enumerate(text):
            if i:
                parts += [{"type": "image", "image": frame} for frame in self._frames]
            if told := piece.substitute(facts):
                parts.append({"type": "text", "text": told})
        return {"role": "user", "content": parts}


@contextmanager
def _alone() -> Iterator[None]:
    """While no other starts or closes; one that hangs in there is waited for only so long."""
    held = _drawing.acquire(timeout=_PATIENCE_S)
    try:
        yield
    finally:
        if held:
            _drawing.release()


def _maker(id: str, make: str, kwargs: dict[str, Any], seed: int) -> Callable[[], Any]:
    """What makes the environment; whether it can be found is known now."""
    if make:
        made = _function(make)
        if "seed" in inspect.signature(made).parameters:
            kwargs.setdefault("seed", seed)
        return lambda: made(**kwargs)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame opens no window
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'rlinf_vl[envs]'") from error
    module, _, name = id.rpartition(":")
    if module:
        importlib.import_module(module)
    spec = gymnasium.spec(name)
    return lambda: gymnasium.make(spec, render_mode="rgb_array", **kwargs)


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute, None) if module and attribute else None
    if not callable(found):
        raise ValueError(f"{name!r} is no callable; write module:name")
    return found


def _action_names(env: Any) -> dict[str, Any]:
    bare = getattr(env, "unwrapped", env)
    if names := getattr(bare, "action_names", None):
        return {name: i for i, name in enumerate(names)}
    if members := getattr(getattr(bare, "actions", None), "__members__", None):  # an enum's
        return {name: action.value for name, action in members.items()}
    return {str(i): i for i in range(int(getattr(env.action_space, "n", 0)))}


def _text_of(problem: Problem) -> str:
    """What the row's last message says."""
    content = problem.messages[-1]["content"] if problem.messages else ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _resized(frame: Image.Image, size: Sequence[int] | None) -> Image.Image:
    """Enlarged pixel by pixel, or reduced smoothly."""
    if not size:
        return frame
    longer = max(frame.size)
    width, height = (max(1, side * size[0] // longer) for side in frame.size) if len(size) == 1 else (size[1], size[0])
    smaller = width * height < frame.width * frame.height
    return frame.resize((width, height), Image.Resampling.LANCZOS if smaller else Image.Resampling.NEAREST)


def _numbers(info: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, float]]:
    for name in names:
        value = info.get(name)
        for inner, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(number, (int, float, np.number, np.bool_)):
                yield f"{name}/{inner}".rstrip("/"), float(number)
