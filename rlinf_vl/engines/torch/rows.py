"""Requests to the torch engine that are not answered yet, and the samples being drawn for them."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_vl.engines.torch.sessions import Kept
from rlinf_vl.types import Completion, Request, Sample


@dataclass
class Pending:
    """A request that is not answered yet.

    Attributes:
        samples: finished samples, by number.
        prefix: the cached prefix behind which the request is prefilled.
        patches: pixels by image hash, for images outside the prefix whose features are not cached.
        routes: routes of the prompt [P, L·k].
    """

    request: Request
    future: Future[Completion] = field(default_factory=Future)
    samples: dict[int, Sample] = field(default_factory=dict)
    prefix: Kept | None = None
    patches: dict[str, np.ndarray] = field(default_factory=dict)
    routes: np.ndarray | None = None


@dataclass
class Row:
    """A sample being drawn: number `number` of its request, with its random numbers `u`."""

    pending: Pending
    number: int
    u: list[float]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # [L·k] of each token but the zero_rows
    done: bool = False  # finished, or its request was cancelled: no more tokens are drawn

    def routes_padded(self, zero_rows: int) -> np.ndarray | None:
        """Return the routes of the prompt and the sampled tokens [·, L·k], followed by `zero_rows`
        rows of zeros."""
        prompt = self.pending.routes
        if prompt is None:
            return None
        sampled = [token_routes[None] for token_routes in self.routes]
        return np.concatenate(
            [prompt, *sampled, np.zeros((zero_rows, prompt.shape[1]), prompt.dtype)]
        )

    @property
    def computed_request(self) -> Request:
        """The request with the sampled tokens behind its prompt, except the zero_rows one, which is
        not computed yet."""
        request = self.pending.request
        return replace(
            request, ids=np.concatenate([request.ids, np.asarray(self.ids[:-1], np.int32)])
        )

    @property
    def length(self) -> int:
        """The number of prompt and sampled tokens."""
        return len(self.pending.request.ids) + len(self.ids)

    def finish(self) -> None:
        """Hand the sample to its request, and resolve the request's future after its zero_rows
        sample."""
        self.done = True
        reason = "stop" if self.ids[-1] in self.pending.request.sampling.stop_ids else "length"
        pending = self.pending
        ids = np.asarray(self.ids, np.int32)
        logprobs = np.asarray(self.logprobs, np.float32)
        versions = np.asarray(self.versions, np.int32)
        # The zero_rows token was never fed to the model, so it has no routes: a row of zeros.
        pending.samples[self.number] = Sample(
            ids, logprobs, versions, reason, routes=self.routes_padded(1)
        )
        if (
            len(pending.samples) == len(pending.request.seeds)
            and pending.future.set_running_or_notify_cancel()
        ):
            pending.future.set_result(
                Completion(tuple(pending.samples[i] for i in range(len(pending.samples))))
            )
