"""Limits the tokens of a thought: an answer is sampled in pieces; thoughts are closed between them.

To the engine a piece is a request like any other. Its prompt is the last piece's prompt and sample,
whose keys and values the engine still has (`Request.sessions`, or a prefix cache). The tokens that
close a thought are part of a prompt: neither sampled nor trained on.
"""

from dataclasses import dataclass, replace

import numpy as np

from rlinf_vl.rollout.episode import random_stream
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.types import Request


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """The limit `tokens` of a thought, including the mark that begins it if that is sampled."""

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
        sampling, stop_ids = request.sampling, request.sampling.stop_ids
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
            stop_ids = (*request.sampling.stop_ids, self.renderer.think_id)
        ids = np.concatenate([request.ids, answer, closing])
        max_new_tokens = min(answer_budget, thought_budget or answer_budget)
        piece_sampling = replace(sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        seeds = (random_stream(seed, f"piece {len(answer)}"),)
        sessions = (session,) if session else ()
        return replace(request, ids=ids, sampling=piece_sampling, seeds=seeds, sessions=sessions)
