"""Builds requests whose prompts and trajectories stay within their limits.

`data.overlong` chooses: drop, cut or refuse a prompt or observation beyond its limit.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlinf_vl.data.unusable import PROMPT_TOO_LONG, PROMPT_UNUSABLE, RowError
from rlinf_vl.rollout.calls import described
from rlinf_vl.rollout.episode import Episode, Played, random_stream
from rlinf_vl.rollout.observation import Observation, observe
from rlinf_vl.rollout.overlong import cut
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.types import Problem, Request, SamplingParams


class TooLong(ValueError):
    """A prompt or a trajectory exceeds its limit."""


def row_error(problem: Problem, error: Exception) -> RowError:
    """Return the error of a row whose own messages can't be made a prompt, with its kind."""
    if isinstance(error, TooLong):
        return RowError(problem.id, PROMPT_TOO_LONG, str(error))
    return RowError(problem.id, PROMPT_UNUSABLE, described(error))


class Following(NamedTuple):
    """The request for the next turn.

    Attributes:
        request: its `max_new_tokens` is below 1 if the trajectory has no room for an answer.
        observation: the environment's reply as the request shows it.
        cut: whether the request shows only the end of the reply.
    """

    request: Request
    observation: Observation
    cut: bool


@dataclass(frozen=True, slots=True)
class Prompts:
    """The builder of requests, with the limits of prompts and trajectories.

    Attributes:
        image_token_id: the id of an image placeholder.
        seq_length: limit on the tokens of an episode.
        max_prompt_length: limit on the tokens of an episode's first prompt.
        overlong: `data.overlong`.
    """

    renderer: Renderer
    image_token_id: int
    seq_length: int
    max_prompt_length: int
    overlong: str

    def first(
        self, observation: Observation, sampling: SamplingParams, any_length: bool = False
    ) -> tuple[Request, Observation]:
        """Build the request for a first answer, without seeds.

        Args:
            any_length: whether to ignore the limit, and cut nothing.

        Returns:
            (the request, the observation that it shows: the whole one, or its end if cut)

        Raises:
            TooLong: the prompt is too long, and may not or can't be cut.
            Exception: the chat template, the tokenizer or the image processor fails.
        """

        def to_request(observation: Observation) -> Request:
            ids, grids = self.renderer.prompt(observation.messages, observation.images)
            return Request(ids, observation.images, grids, sampling, ())

        def fits(observation: Observation) -> bool:
            return len(to_request(observation).ids) <= self.max_prompt_length

        full_request = to_request(observation)
        n_tokens = len(full_request.ids)
        if any_length or n_tokens <= self.max_prompt_length:
            return full_request, observation
        reason = (
            f"the prompt has {n_tokens} tokens, data.max_prompt_length is {self.max_prompt_length}"
        )
        if self.overlong != "cut":
            raise TooLong(f"{reason}; raise that, and runner.seq_length, or set data.overlong=cut")
        cut_observation = cut(observation, fits, ("user",))
        if cut_observation is None:
            raise TooLong(
                f"{reason}, and what may not be cut is longer, too: raise that, and "
                "runner.seq_length"
            )
        return to_request(cut_observation), cut_observation

    def of_row(self, problem: Problem, any_length: bool = False) -> Request:
        """Build the request for a first answer from a problem's own messages.

        It has no seeds and default sampling. `any_length`: as in `first`.

        Raises:
            RowError: the messages make no prompt, or one that is too long.
        """
        try:
            return self.first(observe(problem.messages, problem), SamplingParams(), any_length)[0]
        except Exception as error:
            raise row_error(problem, error) from error

    def next(
        self, episode: Episode, played: Played, last_request: Request, observation: Observation
    ) -> Following:
        """Build the request for the next turn, after an observation.

        Must not change `played`: this may run in an abandoned thread, after the trajectory's end.

        Args:
            last_request: the request for the last answer.

        Raises:
            TooLong: there is no room for another answer, and `overlong` is error.
            Exception: as `first`.
        """
        answer_limit = last_request.sampling.max_new_tokens
        seed = random_stream(episode.seed, f"{len(played.turns)}")

        def to_request(observation: Observation) -> Request:
            """Build the request; its answer gets the room that the trajectory has left."""
            assert episode.first_observation is not None
            observations = [*played.observations, observation]
            turns = list(zip(played.answers, observations, strict=True))
            ids, grids = self.renderer.follow(
                played.sequences[-1].ids, episode.first_observation, turns
            )
            session = last_request.sessions and (episode.session,)
            images = last_request.images + observation.images
            request = Request(ids, images, grids, last_request.sampling, (seed,), session)
            tokens_left = self.seq_length - played.tokens(request, self.image_token_id)
            sampling = replace(last_request.sampling, max_new_tokens=min(answer_limit, tokens_left))
            return replace(request, sampling=sampling)

        def fits(observation: Observation) -> bool:
            return to_request(observation).sampling.max_new_tokens == answer_limit

        full_request = to_request(observation)
        tokens_left = full_request.sampling.max_new_tokens
        if tokens_left >= 1 or self.overlong == "drop":
            return Following(full_request, observation, False)
        if self.overlong == "error":
            raise TooLong(
                f"with what answers turn {len(played.turns)} the trajectory has "
                f"{self.seq_length - tokens_left} tokens, and runner.seq_length is "
                f"{self.seq_length}; raise it, lower rollout.max_turns, or set data.overlong to "
                "cut or drop"
            )
        roles: Collection[str] = {message["role"] for message in observation.messages} - {"system"}
        cut_observation = cut(observation, fits, roles)
        if cut_observation is None:
            # The player ends the episode, as the request has no room for an answer.
            return Following(full_request, observation, False)
        return Following(to_request(cut_observation), cut_observation, True)
