"""Requests for answers within the limits of prompts and trajectories: `data.overlong` says what becomes of what is beyond them."""

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
    """A prompt or a trajectory is beyond its limit."""


def row_error(problem: Problem, error: Exception) -> RowError:
    """What to say of a row whose own messages make no prompt."""
    if isinstance(error, TooLong):
        return RowError(problem.id, PROMPT_TOO_LONG, str(error))
    return RowError(problem.id, PROMPT_UNUSABLE, described(error))


class Following(NamedTuple):
    """The request for the next answer, what it shows of what was said to the last one, and whether that is less than all."""

    request: Request
    said: Observation
    cut: bool


@dataclass(frozen=True, slots=True)
class Prompts:
    """
    Attributes:
        image_token_id: an image's placeholder.
        seq_length: most tokens of an episode; `max_prompt_length`: most tokens that it may begin with.
        overlong: `data.overlong`.
    """

    renderer: Renderer
    image_token_id: int
    seq_length: int
    max_prompt_length: int
    overlong: str

    def first(
        self, said: Observation, sampling: SamplingParams, any_length: bool = False
    ) -> tuple[Request, Observation]:
        """The request for a first answer, without seeds, and what it shows: what was said, or what is left of that.

        Raises:
            TooLong: it is, and is not cut, or can't be; never with `any_length`, which cuts nothing.
            Exception: what the chat template, the tokenizer or the image processor refuses.
        """

        def request(said: Observation) -> Request:
            ids, grids = self.renderer.prompt(said.messages, said.images)
            return Request(ids, said.images, grids, sampling, ())

        def fits(said: Observation) -> bool:
            return len(request(said).ids) <= self.max_prompt_length

        whole = request(said)
        if any_length or len(whole.ids) <= self.max_prompt_length:
            return whole, said
        reason = f"the prompt has {len(whole.ids)} tokens, data.max_prompt_length is {self.max_prompt_length}"
        if self.overlong != "cut":
            raise TooLong(f"{reason}; raise that, and runner.seq_length, or set data.overlong=cut")
        if (shown := cut(said, fits, ("user",))) is None:
            raise TooLong(f"{reason}, and what may not be cut is longer, too: raise that, and runner.seq_length")
        return request(shown), shown

    def of_row(self, problem: Problem, any_length: bool = False) -> Request:
        """What a problem's own messages begin an episode with, as a request without sampling and seeds; RowError: they make none,
        or one that is too long, as `first`."""
        try:
            return self.first(observe(problem.messages, problem), SamplingParams(), any_length)[0]
        except Exception as error:
            raise row_error(problem, error) from error

    def next(self, episode: Episode, played: Played, before: Request, said: Observation) -> Following:
        """What follows on what was said. The request's `max_new_tokens` is what the trajectory has room for: below 1 where there is
        none. Changes nothing of the trajectory, which may be over by now: this may run in a thread that nobody waits for any more.

        Raises:
            TooLong: there is none, and `overlong` is error.
            Exception: as `first`.
        """
        longest, seed = before.sampling.max_new_tokens, random_stream(episode.seed, f"{len(played.turns)}")

        def request(said: Observation) -> Request:
            assert episode.opened is not None
            turns = list(zip(played.answers, [*played.said, said], strict=True))
            ids, grids = self.renderer.follow(played.sequences[-1].ids, episode.opened, turns)
            session = before.sessions and (episode.session,)
            following = Request(ids, before.images + said.images, grids, before.sampling, (seed,), session)
            left = self.seq_length - played.tokens(following, self.image_token_id)
            return replace(following, sampling=replace(before.sampling, max_new_tokens=min(longest, left)))

        def fits(said: Observation) -> bool:
            return request(said).sampling.max_new_tokens == longest

        whole = request(said)
        if (left := whole.sampling.max_new_tokens) >= 1 or self.overlong == "drop":
            return Following(whole, said, False)
        if self.overlong == "error":
            raise TooLong(
                f"with what answers turn {len(played.turns)} the trajectory has {self.seq_length - left} tokens, and "
                f"runner.seq_length is {self.seq_length}; raise it, lower rollout.max_turns, or set data.overlong to cut or drop"
            )
        roles: Collection[str] = {message["role"] for message in said.messages} - {"system"}
        shown = cut(said, fits, roles)
        return Following(whole, said, False) if shown is None else Following(request(shown), shown, True)
