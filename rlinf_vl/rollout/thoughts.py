"""The budget of a thought: an answer is drawn in pieces, and a thought that has used its budget up is closed between two of them.

The engine sees requests like any others: the prompt of the next piece is that of the last one and what was drawn, whose keys and
values it still has (`Request.sessions`, or a prefix cache). What closes a thought is part of a prompt: not sampled, not trained.
"""

from dataclasses import dataclass, replace

import numpy as np

from rlinf_vl.rollout.episode import random_stream
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.types import Request


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """Most `tokens` of a thought, the mark that begins it included if it is sampled."""

    renderer: Renderer
    tokens: int

    def first(self, request: Request) -> Request:
        """The request of an answer's first piece: a thought may begin with its first token, or not at all."""
        most = min(self.tokens, request.sampling.max_new_tokens)
        return replace(request, sampling=replace(request.sampling, max_new_tokens=most))

    def rest(self, request: Request, answer: np.ndarray, seed: int, session: str) -> Request | None:
        """The request of the next piece; None: the answer is complete.

        Args:
            request: of the whole answer.
            answer: what there is of it, int32 [R].
            seed: the answer's random stream; each piece has one of its own.
        """
        sampling, stop = request.sampling, request.sampling.stop_ids
        if len(answer) and answer[-1] in stop:
            return None
        begun, closing = self.renderer.thoughts(answer).open, np.zeros(0, np.int32)
        room = None if begun is None else self.tokens - (len(answer) - begun)
        if room is not None and room < 1:
            room, closing = None, self.renderer.closing
        left = sampling.max_new_tokens - len(answer) - len(closing)
        if left < 1:
            return None
        if room is None and self.renderer.think_id is not None:  # another thought has a budget, too
            stop = (*stop, self.renderer.think_id)
        ids = np.concatenate([request.ids, answer, closing])
        piece = replace(sampling, max_new_tokens=min(left, room or left), stop_ids=stop)
        seeds = (random_stream(seed, f"piece {len(answer)}"),)
        return replace(request, ids=ids, sampling=piece, seeds=seeds, sessions=(session,) if session else ())
