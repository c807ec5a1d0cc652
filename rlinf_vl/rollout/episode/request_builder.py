"""Builds requests whose prompts and trajectories stay within their limits.

- `RequestBuilder` builds the request of each turn. `data.overlong` chooses whether it drops, cuts
  or refuses a prompt or an observation beyond its limit.
- `cut` keeps a context window: the longest end of a conversation that fits.
- `ThoughtBudget` builds requests for the pieces of an answer whose thoughts are limited.

The messages are cut, not the ids. The chat template then renders what remains, so its marks of
turns and its generation prompt are complete, an image has all of its placeholders or none, and
pixels, grids and hashes are those of the images that remain.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from rlinf_vl.data.unusable import PROMPT_TOO_LONG, PROMPT_UNUSABLE, RowError
from rlinf_vl.rollout.episode.faults import error_text
from rlinf_vl.rollout.episode.observation import Observation, observe
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.rollout_state import RolloutState, random_stream
from rlinf_vl.types import ImageRef, Message, Problem, Request, SamplingParams


class TooLong(ValueError):
    """A prompt or a trajectory exceeds its limit."""


def row_error(problem: Problem, error: Exception) -> RowError:
    """Return the error of a row whose own messages can't be made a prompt, with its kind."""
    if isinstance(error, TooLong):
        return RowError(problem.id, PROMPT_TOO_LONG, str(error))
    return RowError(problem.id, PROMPT_UNUSABLE, error_text(error))


class NextRequest(NamedTuple):
    """The request for the next turn.

    Attributes:
        request: its `max_new_tokens` is below 1 if the trajectory has no room for an answer.
        observation: the observation as the request shows it.
        is_cut: whether the request shows only the end of the observation.
    """

    request: Request
    observation: Observation
    is_cut: bool


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """The builder of requests, with the limits of prompts and trajectories.

    Attributes:
        seq_length: limit on the tokens of an episode.
        max_prompt_length: limit on the tokens of an episode's first prompt.
        overlong: `data.overlong`: whether a prompt beyond `max_prompt_length`, or an observation
            that leaves no room for an answer, is dropped, cut or an error.
    """

    renderer: Renderer
    seq_length: int
    max_prompt_length: int
    overlong: str = "drop"

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
            ids, grids = self.renderer.prompt(
                observation.messages, observation.images, observation.tools
            )
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
        # Within a user's message, so that an answer in the history goes with its question.
        cut_observation = cut(observation, fits, ("user",))
        if cut_observation is None:
            raise TooLong(
                f"{reason}, and what may not be cut is longer, too: raise that, and "
                "runner.seq_length"
            )
        return to_request(cut_observation), cut_observation

    def from_row(self, problem: Problem, any_length: bool = False) -> Request:
        """Build the request for a first answer from a problem's own messages.

        It has no seeds and default sampling. `any_length`: as in `first`.

        Raises:
            RowError: the messages make no prompt, or one that is too long.
        """
        try:
            self.renderer.check_shown(problem.messages)
            observation = observe(problem.messages, problem, tools=problem.tools)
            return self.first(observation, SamplingParams(), any_length)[0]
        except Exception as error:
            raise row_error(problem, error) from error

    def next(self, state: RolloutState, observation: Observation) -> NextRequest:
        """Build the request for the next turn of an episode, after an observation.

        Must not change `state`: this may run in an abandoned thread, after the trajectory's end.

        Raises:
            TooLong: there is no room for another answer, and `overlong` is error.
            Exception: as `first`.
        """
        last_request = state.request
        assert last_request is not None and state.first_observation is not None
        answer_limit = last_request.sampling.max_new_tokens
        first_observation = state.first_observation
        observations = list(state.observations)
        # A stream of the turn's own, which does not depend on how many tokens were sampled before.
        seed = random_stream(state.seed, f"{len(state.turns)}")

        def to_request(observation: Observation) -> Request:
            """Build the request; its answer gets the room that the trajectory has left."""
            last_ids = state.sequences[state.turns[-1].sequence].ids
            turns = list(zip(state.answers, [*observations, observation], strict=True))
            ids, grids = self.renderer.follow(last_ids, first_observation, turns)
            session = last_request.sessions and (state.session,)
            images = last_request.images + observation.images
            request = Request(ids, images, grids, last_request.sampling, (seed,), session)
            tokens_left = self.seq_length - state.tokens(
                request, self.renderer.processor.placeholder_ids
            )
            sampling = replace(last_request.sampling, max_new_tokens=min(answer_limit, tokens_left))
            return replace(request, sampling=sampling)

        def fits(observation: Observation) -> bool:
            return to_request(observation).sampling.max_new_tokens == answer_limit

        full_request = to_request(observation)
        tokens_left = full_request.sampling.max_new_tokens
        if tokens_left >= 1 or self.overlong == "drop":
            return NextRequest(full_request, observation, False)
        if self.overlong == "error":
            raise TooLong(
                f"with what answers turn {len(state.turns)} the trajectory has "
                f"{self.seq_length - tokens_left} tokens, and runner.seq_length is "
                f"{self.seq_length}; raise it, lower rollout.max_turns, or set data.overlong to "
                "cut or drop"
            )
        roles: Collection[str] = {message["role"] for message in observation.messages} - {"system"}
        cut_observation = cut(observation, fits, roles)
        if cut_observation is None:
            # The player ends the episode, as the request has no room for an answer.
            return NextRequest(full_request, observation, False)
        return NextRequest(to_request(cut_observation), cut_observation, True)


def cut(
    conversation: Observation, fits: Callable[[Observation], bool], roles: Collection[str]
) -> Observation | None:
    """Return the longest end of a conversation that fits, or None if no end fits.

    Texts are cut by characters, images and messages as a whole. System messages stay whole and in
    place. The cut lies within a message of one of `roles`, and everything before it is removed; so
    an answer in the history goes with the question before it. Something of the last message of
    these roles always remains.
    """
    parts: list[tuple[int, int, dict[str, Any]]] = []  # (message index, part index, part)
    for m, message in enumerate(conversation.messages):
        if message["role"] in roles:
            parts += [(m, p, part) for p, part in enumerate(_parts(message))]
    # Positions for a cut are counted through all parts: one per character, and one per image.
    ends = list(accumulate(len(_text(part)) or 1 for _, _, part in parts))

    def cut_at(position: int) -> Observation:
        k = bisect_right(ends, position)
        m, p, _ = parts[k]
        return _conversation_end(conversation, m, p, position - (ends[k - 1] if k else 0))

    # A later cut leaves less, so `fits` is False up to some position and True from there on.
    positions = range(1, ends[-1] if ends else 1)
    first_fitting = bisect_left(positions, True, key=lambda position: fits(cut_at(position)))
    return cut_at(positions[first_fitting]) if first_fitting < len(positions) else None


def _conversation_end(conversation: Observation, m: int, p: int, n_characters: int) -> Observation:
    """Return the end of a conversation, with the system messages before it.

    The end begins in part `p` of message `m`, after that part's first `n_characters`.
    """
    first_message = conversation.messages[m]
    parts = _parts(first_message)[p:]
    if text := _text(parts[0]):
        parts[0] = parts[0] | {"text": text[n_characters:]}
    # A template may show a text and a list of one text differently: the form stays.
    content = parts[0]["text"] if isinstance(first_message["content"], str) else parts
    messages = [message for message in conversation.messages[:m] if message["role"] == "system"]
    messages.append(first_message | {"content": content})
    messages += conversation.messages[m + 1 :]
    images = {image.url: image for image in conversation.images}
    remaining: list[ImageRef] = []
    for message in messages:
        for part in _parts(message):
            if image := part.get("image_url") or part.get("video_url"):
                remaining.append(images[image["url"]])
    return Observation(tuple(messages), tuple(remaining), conversation.tools)


def _parts(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a message's content, in a new list."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text(part: dict[str, Any]) -> str:
    """Return the text of a part, "" for an image."""
    return part.get("text", "") if part.get("type") == "text" else ""


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """The limit `tokens` of a thought, including the mark that begins it if that is sampled.

    An answer is sampled in pieces, and a thought beyond its limit is closed between two of them.
    To the engine a piece is a request like any other: its prompt is the last piece's prompt and
    sample, whose keys and values the engine still has (`Request.sessions`, or a prefix cache). The
    tokens that close a thought are part of a prompt: neither sampled nor trained on.
    """

    renderer: Renderer
    tokens: int

    def first_piece(self, request: Request) -> Request:
        """Return the request for an answer's first piece, which may consist of a thought."""
        max_new_tokens = min(self.tokens, request.sampling.max_new_tokens)
        return replace(request, sampling=replace(request.sampling, max_new_tokens=max_new_tokens))

    def next_piece(
        self, request: Request, answer: np.ndarray, seed: int, session: str
    ) -> Request | None:
        """Return the request for the next piece of an answer, or None if the answer is complete.

        Args:
            request: the request for the whole answer.
            answer: the ids so far, int32 [R].
            seed: the answer's random stream, from which each piece derives its own.
            session: the episode's name for the engine, or "".
        """
        sampling = request.sampling
        stop_ids = sampling.stop_ids
        if len(answer) and answer[-1] in stop_ids:
            return None
        thought_start = self.renderer.thoughts(answer).open
        closing = np.zeros(0, np.int32)
        thought_budget = None  # tokens that the open thought may still have
        if thought_start is not None:
            thought_budget = self.tokens - (len(answer) - thought_start)
        if thought_budget is not None and thought_budget < 1:
            thought_budget, closing = None, self.renderer.closing
        answer_budget = sampling.max_new_tokens - len(answer) - len(closing)
        if answer_budget < 1:
            return None
        if thought_budget is None and self.renderer.think_id is not None:
            # Stop where another thought begins: it gets a budget of its own.
            stop_ids += (self.renderer.think_id,)
        ids = np.concatenate([request.ids, answer, closing])
        max_new_tokens = min(answer_budget, thought_budget or answer_budget)
        piece_sampling = replace(sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        # Named by its position: the pieces' seeds differ, and come again with the answer's.
        seeds = (random_stream(seed, f"piece {len(answer)}"),)
        sessions = (session,) if session else ()
        return replace(request, ids=ids, sampling=piece_sampling, seeds=seeds, sessions=sessions)
