"""What the torch engine is asked for, and the samples that it is drawing."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_vl.engines.torch.sessions import Kept
from rlinf_vl.types import Completion, Request, Sample


@dataclass
class Pending:
    """A request that is not answered yet; `samples` are those finished, by number. It is prefilled behind what `kept` has;
    `patches`: by hash, of its other images as far as their features are not at hand."""

    request: Request
    future: Future[Completion] = field(default_factory=Future)
    samples: dict[int, Sample] = field(default_factory=dict)
    kept: Kept | None = None
    patches: dict[str, np.ndarray] = field(default_factory=dict)
    routes: np.ndarray | None = None  # [P, L·k], of the prompt


@dataclass
class Row:
    """One sample being drawn: number `number` of its request, with its random numbers `u`."""

    pending: Pending
    number: int
    u: list[float]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # [L·k] of each token but the last
    over: bool = False  # nothing more is drawn: it is finished, or nobody waits for its request

    def all_routes(self, last: int) -> np.ndarray | None:
        """Of the prompt and the sampled tokens, with `last` rows of zeros."""
        prompt = self.pending.routes
        if prompt is None:
            return None
        return np.concatenate(
            [prompt, *(own[None] for own in self.routes), np.zeros((last, prompt.shape[1]), prompt.dtype)]
        )

    @property
    def so_far(self) -> Request:
        """Its request with what it has sampled behind the prompt, but for the last token, which is not computed yet."""
        request = self.pending.request
        return replace(request, ids=np.concatenate([request.ids, np.asarray(self.ids[:-1], np.int32)]))

    @property
    def length(self) -> int:
        """Tokens of its prompt and its own."""
        return len(self.pending.request.ids) + len(self.ids)

    def finish(self) -> None:
        """Give the sample to its request, and that its answer if it was the last one."""
        self.over = True
        reason = "stop" if self.ids[-1] in self.pending.request.sampling.stop_ids else "length"
        pending, sampled = self.pending, (np.asarray(self.ids, np.int32), np.asarray(self.logprobs, np.float32))
        versions = np.asarray(self.versions, np.int32)
        pending.samples[self.number] = Sample(*sampled, versions, reason, routes=self.all_routes(1))
        if len(pending.samples) == len(pending.request.seeds) and pending.future.set_running_or_notify_cancel():
            pending.future.set_result(Completion(tuple(pending.samples[i] for i in range(len(pending.samples)))))
