"""Requests to the torch engine that are not answered yet, and the samples being drawn for them."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_vl.engines.torch.prefix_cache import CachedPrefix
from rlinf_vl.types import Completion, Request, Sample


@dataclass
class Pending:
    """A request that is not answered yet.

    Attributes:
        samples: finished samples, by number.
        prefix: the cached prefix behind which the request is prefilled.
        patches: pixels by image hash, for images outside the prefix whose features are not cached.
        columns: further values of the prompt's tokens, [P, …] (`Sample.columns`).
    """

    request: Request
    future: Future[Completion] = field(default_factory=Future)
    samples: dict[int, Sample] = field(default_factory=dict)
    prefix: CachedPrefix | None = None
    patches: dict[str, np.ndarray] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Row:
    """A sample being drawn: number `number` of its request, with its random numbers `u`."""

    pending: Pending
    number: int
    u: list[float]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    #: Values of each sampled token but the last, which was never fed to the model.
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    done: bool = False  # finished, or its request was cancelled: no more tokens are drawn

    def columns_padded(self, zero_rows: int) -> dict[str, np.ndarray]:
        """Return the columns of the prompt and the sampled tokens [·, …], followed by `zero_rows`
        rows of zeros."""
        padded = {}
        for name, prompt in self.pending.columns.items():
            sampled = [value[None] for value in self.columns.get(name, ())]
            zeros = np.zeros((zero_rows, *prompt.shape[1:]), prompt.dtype)
            padded[name] = np.concatenate([prompt, *sampled, zeros])
        return padded

    @property
    def computed_request(self) -> Request:
        """The request with the sampled tokens behind its prompt, except the last one, which is not
        computed yet."""
        request = self.pending.request
        return replace(
            request, ids=np.concatenate([request.ids, np.asarray(self.ids[:-1], np.int32)])
        )

    @property
    def length(self) -> int:
        """The number of prompt and sampled tokens."""
        return len(self.pending.request.ids) + len(self.ids)

    def finish(self) -> None:
        """Hand the sample to its request, and resolve the request's future after its last
        sample."""
        self.done = True
        reason = "stop" if self.ids[-1] in self.pending.request.sampling.stop_ids else "length"
        pending = self.pending
        ids = np.asarray(self.ids, np.int32)
        logprobs = np.asarray(self.logprobs, np.float32)
        versions = np.asarray(self.versions, np.int32)
        pending.samples[self.number] = Sample(
            ids, logprobs, versions, reason, self.columns_padded(1)
        )
        if (
            len(pending.samples) == len(pending.request.seeds)
            and pending.future.set_running_or_notify_cancel()
        ):
            pending.future.set_result(
                Completion(tuple(pending.samples[i] for i in range(len(pending.samples))))
            )
