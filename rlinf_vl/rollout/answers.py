"""Answers of an engine: asked for, waited for, and drawn in pieces where thoughts have a budget. No Ray."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlinf_vl.data.unusable import ImageError, RowError
from rlinf_vl.engines.base import Engine, EngineDied
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.busy import BusyTime
from rlinf_vl.rollout.calls import described
from rlinf_vl.rollout.episode import Episode, Played
from rlinf_vl.rollout.inbox import awaitable
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.rollout.thoughts import ThoughtBudget
from rlinf_vl.types import ENGINE_FAULT, Completion, Request

Answer = asyncio.Future[Completion]


class RolloutFault(RuntimeError):
    """What failed is not the row: "kind: reason", with `ENGINE_FAULT` or `ENVIRONMENT_FAULT` for the kind."""


@dataclass(frozen=True, eq=False)
class Answers:
    """
    Attributes:
        alive_timeout_s: an engine that does not say that it lives within so many seconds is dead.
        budget: most tokens of a thought.
        busy: how long the engine had requests.
    """

    engine: Engine
    renderer: Renderer
    processor: Processor
    alive_timeout_s: float
    budget: ThoughtBudget | None
    busy: BusyTime = field(default_factory=BusyTime)

    def ask(self, requests: Sequence[Request]) -> list[Answer]:
        """Submit these requests, or those of their answers' first pieces. Raises EngineDied."""
        return self._submit([self.budget.first(request) for request in requests] if self.budget else requests)

    def _submit(self, requests: Sequence[Request]) -> list[Answer]:
        try:
            futures = self.engine.submit(requests)
        except RuntimeError as error:
            raise EngineDied(f"it takes no requests: {error}") from error
        self.busy.watch(futures)
        answers = [awaitable(future) for future in futures]
        for answer in answers:  # perhaps nobody waits for it any more
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        return answers

    async def draw(self, episode: Episode, played: Played, request: Request, answer: Answer, place: int) -> str:
        """Add an answer, of which sample `place` is the first piece, or all; returns what it says behind its thoughts.

        Raises:
            EngineDied, RolloutFault.
            RowError, ImageError: an image of the request can't be used.
        """
        asked, seed = request, request.seeds[place]
        while asked is not None:
            sample = (await self._drawn(answer)).samples[place]
            played.add(asked, sample, self.processor, piece=asked is not request)
            if sample.finish_reason == "error":
                raise RolloutFault(f"{ENGINE_FAULT}: it gave up on this sample")
            asked = None
            if self.budget and len(sample.ids):
                asked = self.budget.rest(request, played.answer, seed, episode.session)
            if asked is not None:
                (answer,), place = self._submit([asked]), 0
        thoughts = self.renderer.thoughts(played.answer)
        played.turns[-1] = replace(played.turns[-1], thought=thoughts.tokens)
        if self.budget and not set(played.answer[-1:].tolist()) & set(request.sampling.stop_ids):
            played.turns[-1] = replace(played.turns[-1], finish_reason="length")  # stopped where a thought began
        return thoughts.said

    async def _drawn(self, answer: Answer) -> Completion:
        try:
            return await answer
        except Exception as error:
            if not await asyncio.to_thread(self.engine.alive, self.alive_timeout_s):
                raise EngineDied(f"the engine died: {error}") from error
            if not isinstance(error, (RowError, ImageError)):
                raise RolloutFault(f"{ENGINE_FAULT}: {described(error)}") from error
            raise
