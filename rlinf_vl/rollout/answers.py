"""Requests answers from an engine and waits for them, piece by piece if thoughts have a budget.

No Ray.
"""

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
    """The engine or the environment failed, not the row.

    The message is "kind: reason"; the kind is `ENGINE_FAULT` or `ENVIRONMENT_FAULT`.
    """


@dataclass(frozen=True, eq=False)
class Answers:
    """The client of a worker's engine: submits requests and adds the answers to trajectories.

    Attributes:
        alive_timeout_s: seconds within which the engine must answer a health check; otherwise it
            counts as dead.
        budget: limit on the tokens of a thought, None for no limit.
        busy: measures how long the engine had requests.
    """

    engine: Engine
    renderer: Renderer
    processor: Processor
    alive_timeout_s: float
    budget: ThoughtBudget | None
    busy: BusyTime = field(default_factory=BusyTime)

    def ask(self, requests: Sequence[Request]) -> list[Answer]:
        """Submit requests. With a thought budget, each asks for the answer's first piece only.

        Raises:
            EngineDied.
        """
        if self.budget is not None:
            requests = [self.budget.first_piece(request) for request in requests]
        return self._submit(requests)

    def _submit(self, requests: Sequence[Request]) -> list[Answer]:
        try:
            futures = self.engine.submit(requests)
        except RuntimeError as error:
            raise EngineDied(f"it takes no requests: {error}") from error
        self.busy.watch(futures)
        answers = [awaitable(future) for future in futures]
        for answer in answers:
            # Read the exception: asyncio would log it as never retrieved if the waiting episode
            # has ended meanwhile.
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        return answers

    async def draw(
        self, episode: Episode, played: Played, request: Request, answer: Answer, sample_index: int
    ) -> str:
        """Wait for an answer, add it to the trajectory, and return its text after the thoughts.

        Args:
            answer: the submitted request; with a thought budget, that of the first piece.
            sample_index: which of the request's samples belongs to this episode.

        Raises:
            EngineDied, RolloutFault.
            RowError, ImageError: an image of the request can't be used.
        """
        piece_request, seed = request, request.seeds[sample_index]
        while piece_request is not None:
            sample = (await self._wait_for(answer)).samples[sample_index]
            played.add(piece_request, sample, self.processor, piece=piece_request is not request)
            if sample.finish_reason == "error":
                raise RolloutFault(f"{ENGINE_FAULT}: it gave up on this sample")
            piece_request = None
            if self.budget and len(sample.ids):
                piece_request = self.budget.next_piece(
                    request, played.answer, seed, episode.session
                )
            if piece_request is not None:
                # Further pieces differ between samples, so each has a request of its own.
                (answer,), sample_index = self._submit([piece_request]), 0
        thoughts = self.renderer.thoughts(played.answer)
        played.turns[-1] = replace(played.turns[-1], thought=thoughts.tokens)
        if self.budget and not set(played.answer[-1:].tolist()) & set(request.sampling.stop_ids):
            # The last piece may have stopped at `<think>`, which is no stop id of the request.
            played.turns[-1] = replace(played.turns[-1], finish_reason="length")
        return thoughts.reply

    async def _wait_for(self, answer: Answer) -> Completion:
        """Wait for an answer, and tell a dead engine from a request that failed."""
        try:
            return await answer
        except Exception as error:
            if not await asyncio.to_thread(self.engine.alive, self.alive_timeout_s):
                raise EngineDied(f"the engine died: {error}") from error
            if not isinstance(error, (RowError, ImageError)):
                raise RolloutFault(f"{ENGINE_FAULT}: {described(error)}") from error
            raise
