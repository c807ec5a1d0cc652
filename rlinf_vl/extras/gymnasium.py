"""An adapter for environments that render `rgb_array`: registered with Gymnasium, or made by a
function."""

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
from rlinf_vl.errors import pip_install
from rlinf_vl.types import Message, Problem

TEMPLATE = r"""<image>
Answer with one of $actions as in \boxed{$example}.
---
<image>
---
That is none of $actions. Answer as in \boxed{$example}.
"""
#: Seconds that one environment waits for another's start or close: one that hangs must not stop the
#: others.
_PATIENCE_S = 10.0
#: Held while an environment starts or closes. Many draw with pygame, whose set-up and exit are
#: global to the process.
_drawing = Lock()


class Gymnasium:
    """An episode in which the policy sees rendered frames and names actions.

    Each answer is a step, or gets the text for invalid answers.

    The start is drawn from `group_seed`, and later randomness from `seed`. An environment without
    Gymnasium's `np_random` can't separate them: there `group_seed` decides both.

    Args:
        id: of `gymnasium.make`; `module:id` imports the module first, which registers it
            (minigrid:MiniGrid-Empty-5x5-v0).
        make: instead of `id`, `module:callable` that makes an environment with `reset`, `step` and
            `render`, in the form of Gymnasium or of the old gym (crafter:Env). It gets `seed` if it
            has a parameter of that name.
        make_kwargs: keywords for either.
        actions: name → action; or a list of names, whose positions are the actions. By default the
            names that the environment defines (`action_names`, or an enum `actions`), or else the
            numbers of its discrete actions.
        parser: `module:function` from an answer to an action, or None for an invalid answer. By
            default the last \\boxed{…} of an answer names the action, or else the whole answer
            does; case is ignored.
        template: texts for the start, each turn and an invalid answer, separated by lines of `---`.
            `<image>` stands for the frames. $actions: the names of the actions; $example: one of
            them; $task: text of the row; $reward: reward of the last step; $turn, $left: number of
            answers given, and left within `max_episode_steps`; $observation: text observed, or, for
            an observation with several entries, each text by its name, such as $mission.
        size: size of the frames in a message: pixels of the longer side, or [height, width]; None
            leaves them as rendered.
        history: number of frames in each turn, the newest last.
        reward_scale: factor of the environment's rewards.
        invalid_reward: reward of an invalid answer.
        max_episode_steps: number of answers, invalid ones included, after which an episode ends;
            None: no limit of its own.
        success_above: an episode counts as correct if the environment's rewards sum to more than
            this.
        metrics: names in the environment's `info` to record; a mapping is recorded number by
            number.

    Raises:
        ImportError: a package is missing.
        ValueError: a keyword is invalid.
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
            raise ValueError(
                f"history={history} and max_episode_steps={max_episode_steps} must be at least 1"
            )
        self._size = _checked_size(size)
        if isinstance(actions, str):
            raise ValueError(
                f"actions={actions!r} must be a list of names, or a mapping of names to actions"
            )
        self._make = _maker(id, make, dict(make_kwargs or {}), group_seed % 2**31)
        self._parser: Callable[[str], Any] | None = _function(parser) if parser else None
        texts = _texts(template)
        self._start_text, self._turn_text = texts[:2]
        self._invalid_text = texts[-1]  # the turn's text where the template has no third one
        self._actions = (
            {name: i for i, name in enumerate(actions)}
            if isinstance(actions, Sequence)
            else actions
        )
        self._frames: deque[Image.Image] = deque(maxlen=history)
        self._reward_scale, self._invalid_reward, self._success_above = (
            reward_scale,
            invalid_reward,
            success_above,
        )
        self._max_steps = max_episode_steps
        self._metrics = metrics
        # Environments of the old gym refuse seeds of more than 31 bits.
        self._seed, self._group_seed = seed, group_seed % 2**31
        self._env: Any = None
        self._turns, self._invalid, self._total = 0, 0, 0.0
        self._task = ""
        self._observed_texts: dict[str, str] = {}
        self._names: dict[str, Any] = {}
        self._state = ""

    def start(self, problem: Problem) -> list[Message]:
        with _exclusive_drawing():
            self._env = self._make()
            takes_seed = "seed" in inspect.signature(self._env.reset).parameters
            reset_result = (
                self._env.reset(seed=self._group_seed) if takes_seed else self._env.reset()
            )
            unwrapped = getattr(self._env, "unwrapped", self._env)
            if takes_seed and hasattr(unwrapped, "np_random"):
                unwrapped.np_random = np.random.default_rng(self._seed)
            # Gymnasium returns (observation, info), the old gym the observation alone.
            self._record_observation(
                reset_result[0] if isinstance(reset_result, tuple) else reset_result
            )
        table = self._actions or _action_names(self._env)
        if not table and self._parser is None:
            raise ValueError(
                f"{self._env.action_space} is not discrete: give a table of actions, or a parser"
            )
        # YAML has lists only; a continuous action must be an array.
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
        state = self._state  # the state in which the response was given, not the one after it
        action = self._parse(response)
        reward, over, info = 0.0, False, {}
        if action is None:
            self._invalid += 1
            message, step_reward = self._invalid_text, self._invalid_reward
        else:
            observation, reward, *ends, info = self._env.step(action)
            # (terminated, truncated), or the old gym's (done)
            reward, over = float(reward), any(ends)
            self._total += reward
            self._record_observation(observation)
            message, step_reward = self._turn_text, reward * self._reward_scale
        done = over or (self._max_steps is not None and self._turns >= self._max_steps)
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
            # Closed at once, since the other episodes of its group may go on for long.
            self.close()
        return StepResult(messages, step_reward, done, facts)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None and hasattr(env, "close"):
            with _exclusive_drawing():
                env.close()

    def _parse(self, response: str) -> Any:
        """Return the action that an answer names; None if it names none."""
        if self._parser is not None:
            return self._parser(response)
        # Models wrap a name in quotes, emphasis and full stops; none of these is part of a name.
        boxed = re.findall(r"\\boxed\{([^{}]*)\}", response)
        return self._names.get(
            (boxed[-1] if boxed else response).strip(" \t\r\n.!'\"`*").casefold()
        )

    def _record_observation(self, observation: Any) -> None:
        """Store the rendered frame, its state and the texts of an observation."""
        frame = np.asarray(self._env.render())
        if frame.ndim != 3 or frame.dtype != np.uint8:
            raise ValueError(
                f"render() gave {frame.dtype} of shape {frame.shape}, not uint8 of [height, width, "
                "3]"
            )
        # Turns with equal frames count as turns in the same state (GiGPO).
        self._state = hashlib.blake2b(frame.tobytes(), digest_size=12).hexdigest()
        self._frames.append(_resized(Image.fromarray(frame), self._size))
        entries = observation if isinstance(observation, Mapping) else {"observation": observation}
        self._observed_texts = {
            name: text for name, text in entries.items() if isinstance(text, str)
        }

    def _message(self, text: list[Template], reward: float = 0.0) -> Message:
        """Fill a template's pieces and put the frames between them.

        Raises KeyError if the template names an unknown fact.
        """
        remaining = "" if self._max_steps is None else self._max_steps - self._turns
        names = list(self._names)
        facts = {
            "actions": ", ".join(names),
            "example": "".join(names[:1]),
            "task": self._task,
            "reward": f"{reward:g}",
        }
        facts |= {"turn": self._turns, "left": remaining} | self._observed_texts
        parts: list[dict[str, Any]] = []
        for i, piece in enumerate(text):
            if i:
                parts += [{"type": "image", "image": frame} for frame in self._frames]
            if filled := piece.substitute(facts):
                parts.append({"type": "text", "text": filled})
        return {"role": "user", "content": parts}


@contextmanager
def _exclusive_drawing() -> Iterator[None]:
    """Run the block while no other environment starts or closes, or after waiting `_PATIENCE_S`."""
    acquired = _drawing.acquire(timeout=_PATIENCE_S)
    try:
        yield
    finally:
        if acquired:
            _drawing.release()


def _maker(id: str, make: str, kwargs: dict[str, Any], seed: int) -> Callable[[], Any]:
    """Return a function that makes the environment. Raises now if the environment can't be
    found."""
    if make:
        constructor = _function(make)
        if "seed" in inspect.signature(constructor).parameters:
            kwargs.setdefault("seed", seed)
        return lambda: constructor(**kwargs)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame opens no window
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(f"{error}; {pip_install('rlinf_vl[envs]')}") from error
    module, _, name = id.rpartition(":")
    if module:
        importlib.import_module(module)
    spec = gymnasium.spec(name)
    return lambda: gymnasium.make(spec, render_mode="rgb_array", **kwargs)


def _checked_size(size: int | Sequence[int] | None) -> Sequence[int] | None:
    """Return the size of frames as a list: the longer side, or height and width.

    Raises:
        ValueError: it is no size in pixels.
    """
    sides = [size] if isinstance(size, int) else size
    if sides and not (
        len(sides) <= 2 and all(isinstance(side, int) and 1 <= side <= 8192 for side in sides)
    ):
        raise ValueError(
            f"size={size} must be a number of pixels from 1 to 8192, or [height, width]"
        )
    return sides


def _texts(template: str) -> list[list[Template]]:
    """Return the texts of a template, each split at its images.

    Raises:
        ValueError: they are not two or three, or one has an invalid $.
    """
    sections = re.split(r"^---\s*$", template, flags=re.MULTILINE)
    texts = [_pieces(section) for section in sections]
    if not 2 <= len(texts) <= 3 or not all(piece.is_valid() for text in texts for piece in text):
        raise ValueError(
            "template: write two or three texts (start, turn, invalid answer) between lines "
            "of ---; $$ is a $"
        )
    return texts


def _pieces(section: str) -> list[Template]:
    """Split a section of the template at its images."""
    return [Template(piece) for piece in section.strip("\n").split("<image>")]


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function = (
        getattr(importlib.import_module(module), attribute, None) if module and attribute else None
    )
    if not callable(function):
        raise ValueError(f"{name!r} is no callable; write module:name")
    return function


def _action_names(env: Any) -> dict[str, Any]:
    """Return name → action as the environment defines them; {} if its actions are not discrete."""
    unwrapped = getattr(env, "unwrapped", env)
    if names := getattr(unwrapped, "action_names", None):
        return {name: i for i, name in enumerate(names)}
    if members := getattr(getattr(unwrapped, "actions", None), "__members__", None):  # an enum
        return {name: action.value for name, action in members.items()}
    return {str(i): i for i in range(int(getattr(env.action_space, "n", 0)))}


def _text_of(problem: Problem) -> str:
    """Return the text of the row's last message."""
    content = problem.messages[-1]["content"] if problem.messages else ""
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def _resized(frame: Image.Image, size: Sequence[int] | None) -> Image.Image:
    """Resize a frame: enlarge it pixel by pixel, or reduce it smoothly."""
    if not size:
        return frame
    longer = max(frame.size)
    width, height = (
        (max(1, side * size[0] // longer) for side in frame.size)
        if len(size) == 1
        else (size[1], size[0])
    )
    smaller = width * height < frame.width * frame.height
    return frame.resize(
        (width, height), Image.Resampling.LANCZOS if smaller else Image.Resampling.NEAREST
    )


def _numbers(info: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in `info` under these names; those of a mapping as NAME/KEY."""
    for name in names:
        value = info.get(name)
        for inner, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(number, (int, float, np.number, np.bool_)):
                yield f"{name}/{inner}".rstrip("/"), float(number)
