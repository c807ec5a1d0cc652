"""Episodes: an environment and an engine in turn, until a `Trajectory` is there. No Ray.

Invariants:
- An error is data: a row, image, engine or environment that fails ends its trajectory, which carries the reason, is counted and
  never trained on. Only `EngineDied` is raised. A response that can't be graded within the grader's limits is wrong, no error.
- Each turn's prompt begins with all ids before it, and shows all images so far.
- Every environment that was made is closed, and gets one call at a time, also where nobody waits any more.
"""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vl.data.images import to_image_ref
from rlinf_vl.data.unusable import PROMPT_TOO_LONG, PROMPT_UNUSABLE, ImageError, RowError, kind_and_reason
from rlinf_vl.engines.base import Engine, EngineDied
from rlinf_vl.envs import Env, EnvMaker, StepResult
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.spans import span
from rlinf_vl.rewards import GradingError
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.types import (
    ENGINE_FAULT,
    ENVIRONMENT_FAULT,
    IMAGE_URL_PREFIX,
    UNGRADABLE,
    Completion,
    Group,
    ImageRef,
    Message,
    Problem,
    Request,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)


class RolloutFault(RuntimeError):
    """What failed is not the row: "kind: reason", with `ENGINE_FAULT` or `ENVIRONMENT_FAULT` for the kind."""


@dataclass(eq=False)
class Episode:
    """One trajectory to be. Its first answer is sample `place` of its opening's request number `request`."""

    seed: int
    group_seed: int = 0
    env: Env | None = None
    request: int = 0
    place: int = 0
    error: Exception | None = None  # why it can't begin

    def close(self) -> None:
        env, self.env = self.env, None
        try:
            if env is not None:
                env.close()
        except Exception as error:  # its trajectory is what it is
            log.warning("an environment did not close: %s: %s", type(error).__name__, error)


@dataclass(eq=False)
class Opening:
    """The episodes of a group, started, and requests for their first answers: one request for all that begin alike."""

    problem: Problem
    episodes: list[Episode]
    requests: list[Request]

    def close(self) -> None:
        for episode in self.episodes:
            episode.close()


@dataclass(frozen=True, eq=False)
class Player:
    """
    Attributes:
        make_env: (problem, seed, group_seed) → a new environment.
        seq_length: most tokens of an episode; `max_prompt_length`: most tokens that it may begin with.
        reward_min: reward of a response that can't be graded.
        return_logprobs: whether trajectories have the engine's logprobs.
        alive_timeout_s: an engine that does not say that it lives within so many seconds is dead.
        max_turns: most answers of an episode.
    """

    engine: Engine
    renderer: Renderer
    processor: Processor
    make_env: EnvMaker
    seq_length: int
    max_prompt_length: int
    reward_min: float
    return_logprobs: bool
    alive_timeout_s: float
    max_turns: int | None = None
    max_concurrent: int | None = None
    turn_timeout_s: float = 60.0
    episode_timeout_s: float | None = None

    def prompt(
        self, problem: Problem, messages: Sequence[Message], sampling: SamplingParams, any_length: bool = False
    ) -> Request:
        """What an episode begins with, as a request without seeds.

        Raises:
            RowError: the problem's own messages or images make no prompt; or it is too long, unless `any_length`.
            RolloutFault: an environment's messages make no prompt.
        """
        try:
            images = _images(messages, problem)
            ids, grids = self.renderer.prompt(messages, images)
        except Exception as error:  # what the chat template, the tokenizer or the image processor refuses
            reason = f"{type(error).__name__}: {error}"
            if messages == list(problem.messages):
                raise RowError(problem.id, PROMPT_UNUSABLE, reason) from error
            raise self._env_fault(problem, f"began with messages that make no prompt: {reason}") from error
        if len(ids) > self.max_prompt_length and not any_length:
            reason = f"the prompt has {len(ids)} tokens, data.max_prompt_length is {self.max_prompt_length}"
            raise RowError(problem.id, PROMPT_TOO_LONG, reason)
        return Request(ids, images, grids, sampling, ())

    def open(self, problem: Problem, seeds: Sequence[int], sampling: SamplingParams, group_seed: int = 0) -> Opening:
        """Start an environment for each seed, and render what it says."""
        opening = Opening(problem, [Episode(seed, group_seed) for seed in seeds], [])
        starts: list[list[Message]] = []  # of each request
        for episode in opening.episodes:
            try:
                messages = self._start(episode, problem)
                number = next((n for n, other in enumerate(starts) if _alike(other, messages)), len(starts))
                if number == len(starts):
                    opening.requests.append(self.prompt(problem, messages, sampling))
                    starts.append(messages)
            except Exception as error:
                episode.error = error
                continue
            request = opening.requests[number]
            episode.request, episode.place = number, len(request.seeds)
            opening.requests[number] = replace(request, seeds=(*request.seeds, episode.seed))
        return opening

    async def play(self, group_id: str, opening: Opening, first: Sequence["Future[Completion]"]) -> Group:
        """The group of an opening. `first` has the engine's answers to its requests.

        Raises:
            EngineDied: all episodes end.
        """
        answers = [asyncio.wrap_future(future) for future in first]
        plays = [asyncio.ensure_future(self._episode(opening, episode, answers)) for episode in opening.episodes]
        try:
            trajectories = await asyncio.gather(*plays)
        finally:
            for play in plays:
                play.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
        sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
        shared = [len(request.ids) for request in opening.requests] if sequences else [0]
        if len(opening.requests) > 1 and sequences:
            shared += [sequences[0].shared_length(other, self.processor.image_token_id) for other in sequences]
        return Group(group_id, opening.problem.id, min(shared), tuple(trajectories), opening.problem.answer)

    async def _episode(
        self, opening: Opening, episode: Episode, answers: Sequence["asyncio.Future[Completion]"]
    ) -> Trajectory:
        """Sample, step, extend; until the environment is done, the budget of tokens is used up, or something fails."""
        sequence: TokenSequence | None = None
        turns: list[Turn] = []
        parts: dict[str, float] = {}
        metrics: dict[str, float] = {}
        correct, status, fault = False, "error", None
        try:
            if episode.error is not None:
                raise episode.error
            request, answer, place = opening.requests[episode.request], answers[episode.request], episode.place
            while True:
                sample = (await self._answered(answer, request, opening.problem)).samples[place]
                sequence = _continued(sequence, TokenSequence.of_sample(request, sample))
                sequence.assert_images_placed(self.processor.image_token_id, self.processor.merge_size)
                turns.append(Turn(0, len(request.ids), len(sequence.ids), sample.finish_reason, 0.0))
                if sample.finish_reason == "error":
                    raise RolloutFault(f"{ENGINE_FAULT}: it gave up on this sample")
                result = await in_thread(self._step, episode, sample.ids, opening.problem)
                turns[-1] = replace(turns[-1], reward=result.reward, info=result.info["facts"])
                for name, part in result.info["reward_parts"].items():
                    parts[name] = parts.get(name, 0.0) + part
                metrics |= result.info["metrics"]
                correct, status = result.info["correct"], sample.finish_reason
                if result.done:
                    break
                if len(turns) == self.max_turns:
                    status = "length"
                    break
                seed = _turn_seed(episode.seed, len(turns))
                request = await in_thread(self._extend, request, sequence, result.messages, seed, opening.problem)
                if request.sampling.max_new_tokens < 1:
                    status = "length"
                    break
                answer, place = asyncio.wrap_future(self.engine.submit([request])[0]), 0
        except EngineDied:
            raise
        except Exception as error:
            log.warning("%s: %s", opening.problem.id, error)
            fault = str(error) if isinstance(error, RolloutFault) else ": ".join(kind_and_reason(error))
            parts, metrics, correct, status = {}, {}, False, "error"
        finally:
            await in_thread(episode.close)
        if sequence is not None and not self.return_logprobs:
            sequence = replace(sequence, logprobs=None)
        reward = 0.0 if fault else sum(turn.reward for turn in turns)
        sequences = (sequence,) if sequence else ()
        return Trajectory(sequences, tuple(turns), reward, parts, status, correct, fault, metrics)

    async def _answered(self, answer: "asyncio.Future[Completion]", request: Request, problem: Problem) -> Completion:
        """What the engine draws. An image that can't be decoded is the fault of the row, or of the environment that showed it.

        Raises:
            EngineDied, RolloutFault, RowError, ImageError.
        """
        try:
            return await answer
        except Exception as error:
            if not await asyncio.to_thread(self.engine.alive, self.alive_timeout_s):
                raise EngineDied(f"the engine died: {error}") from error
            if not isinstance(error, (RowError, ImageError)):
                raise RolloutFault(f"{ENGINE_FAULT}: {type(error).__name__}: {error}") from error
            if not {image.hash for image in request.images} <= {image.hash for image in problem.images}:
                raise self._env_fault(problem, f"shows an image that can't be used: {error}") from error
            raise

    def _start(self, episode: Episode, problem: Problem) -> list[Message]:
        try:
            episode.env = self.make_env(problem, episode.seed, episode.group_seed)
            return list(episode.env.start(problem))
        except Exception as error:
            raise self._env_fault(problem, f"did not start: {type(error).__name__}: {error}") from error

    def _step(self, episode: Episode, ids: np.ndarray, problem: Problem) -> StepResult:
        """What the environment says to an answer, with a finite reward and, in `info`, what `recorded` gives."""
        assert episode.env is not None
        try:
            with span("environment"):
                result = episode.env.step(self.processor.decode(ids))
            if not math.isfinite(result.reward):
                raise ValueError(f"it gave reward {result.reward}")
            return replace(result, reward=float(result.reward), info=recorded(result.info))
        except GradingError as error:
            log.info("%s: no verdict, so the answer is wrong: %s", problem.id, error)
            return StepResult((), self.reward_min, True, recorded({"reward_parts": {UNGRADABLE: 1.0}}))
        except Exception as error:
            raise self._env_fault(problem, f"failed: {type(error).__name__}: {error}") from error

    def _extend(
        self, before: Request, sequence: TokenSequence, messages: Iterable[Message], seed: int, problem: Problem
    ) -> Request:
        """The next turn. Its `max_new_tokens` is what the budget allows: below 1 where that is used up."""
        try:
            observed = list(messages)
            images = _images(observed, problem)
            new, grids = self.renderer.extend(sequence.ids, observed, images)
        except Exception as error:
            raise self._env_fault(problem, f"answered what can't follow: {type(error).__name__}: {error}") from error
        ids = np.concatenate([sequence.ids, new])
        most = min(before.sampling.max_new_tokens, self.seq_length - len(ids))
        sampling = replace(before.sampling, max_new_tokens=most)
        return Request(ids, before.images + images, np.concatenate([before.image_grids, grids]), sampling, (seed,))

    def _env_fault(self, problem: Problem, what: str) -> RolloutFault:
        return RolloutFault(f"{ENVIRONMENT_FAULT}: {self.make_env.name_of(problem)!r} {what}")


def recorded(info: Mapping[str, Any]) -> dict[str, Any]:
    """Of `StepResult.info` what a trajectory keeps: correct (bool), reward_parts and metrics (finite floats by name), and facts
    (str): `Turn.info`.

    Raises:
        ValueError, TypeError: something in it is of another kind.
    """
    numbers = {
        kind: {str(name): float(value) for name, value in dict(info.get(kind, {})).items()}
        for kind in ("reward_parts", "metrics")
    }
    for name, value in (pair for found in numbers.values() for pair in found.items()):
        if not math.isfinite(value):
            raise ValueError(f"it gave {name} {value}")
    if not isinstance(info.get("state", ""), str):
        raise TypeError(f"it gave the state {info['state']!r}, which is no string")
    facts = {name: info[name] for name in ("tool_calls", "state") if name in info}
    return {**numbers, "correct": bool(info.get("correct", False)), "facts": json.dumps(facts) if facts else ""}


def _images(messages: Iterable[Message], problem: Problem) -> tuple[ImageRef, ...]:
    """The images that messages show, in order: the problem's, by address, or new ones as arrays or in any form of `to_image_ref`.

    Raises:
        ImageError: one can't be used.
    """
    known = {image.url: image for image in problem.images}
    found = []
    for message in messages:
        for part in message["content"] if isinstance(message["content"], (list, tuple)) else ():
            if "image" not in part and "image_url" not in part and part.get("type") not in ("image", "image_url"):
                continue
            value = part.get("image_url", part.get("image"))
            value = value["url"] if isinstance(value, dict) and "url" in value else value
            if isinstance(value, str) and value.startswith(IMAGE_URL_PREFIX):
                if value not in known:
                    raise ImageError(PROMPT_UNUSABLE, f"{value} is no image of the problem")
                found.append(known[value])
            else:
                value = Image.fromarray(value) if isinstance(value, np.ndarray) else value
                found.append(to_image_ref(value, root=None))
    return tuple(found)


def _alike(ours: list[Message], theirs: list[Message]) -> bool:
    try:
        return bool(ours == theirs)
    except ValueError:  # arrays don't compare to one truth value
        return False


def _continued(before: TokenSequence | None, after: TokenSequence) -> TokenSequence:
    """`after`, a prompt with its answer, with what `before` knows of the prompt's first tokens."""
    if before is None:
        return after
    n, arrays = len(before.ids), after.arrays()
    assert np.array_equal(before.ids, after.ids[:n]), "a turn's prompt must begin with all ids before it"
    for name, array in before.arrays().items():
        arrays[name][:n] = array
    return after


def _turn_seed(seed: int, turn: int) -> int:
    """The random stream of a later turn."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little")


async def in_thread(function: Callable, *arguments: Any) -> Any:
    """Call it in a thread, and wait until it has returned even when cancelled."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
