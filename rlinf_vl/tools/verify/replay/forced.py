"""The step as the torch engine computes it: prefill, and decoding that is forced to the recorded
ids."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlinf_vl.engines.torch.batch import Batch
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.engines.torch.rows import Row
from rlinf_vl.engines.torch.sampling import Sampler
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.hooks import Hooks, as_array
from rlinf_vl.tools.verify.replay.quantities import Owner, Quantity, Trace
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.types import Request, SamplingParams

#: Bytes that the engine may assume to be free.
FREE_BYTES = 2**30


@dataclass(frozen=True)
class ForcedTurn:
    """Tokens `start` … `end` of a sequence, which the engine is made to sample.

    `owner` is the sequence's.
    """

    owner: Owner
    start: int
    end: int
    ids: np.ndarray


class _ForcedSampler(Sampler):
    """A sampler that draws the given ids; everything else is the engine's own code."""

    def __init__(self, params: Sequence[SamplingParams], banned: torch.Tensor) -> None:
        super().__init__(params, banned)
        self.forced = torch.zeros(0, dtype=torch.int64)
        self.put: Any = None

    def __call__(self, logits: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.put(Quantity.of("logits"), logits)
        ids, logprobs = super().__call__(logits, u)
        self.put(Quantity.of("logprobs"), logprobs)
        return ids, logprobs

    def choose(self, p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return self.forced


class _ForcedBatch(Batch):
    """A batch whose rows get recorded ids, and whose activations go into a trace."""

    hooks: Hooks
    turns: Mapping[int, list[ForcedTurn]]  # by `id` of a request, one for each of its rows
    computed: Counter[Owner]  # tokens of each sequence that are in the trace

    def _turn(self, row: Row) -> ForcedTurn:
        return self.turns[id(row.pending.request)][row.number]

    def _prefill(self, requests: Sequence[Request], prefixes: Any, patches: Any) -> Any:
        lengths = [
            len(request.ids) - (len(prefix.ids) if prefix else 0)
            for request, prefix in zip(requests, prefixes, strict=True)
        ]

        def rows(tensor: torch.Tensor) -> Iterator[tuple[Owner, torch.Tensor]]:
            for request, part in zip(requests, tensor.split(lengths), strict=True):
                for turn in self.turns.get(id(request), ()):
                    # A session that was not reused is prefilled from its first token on.
                    n_computed = self.computed[turn.owner] - (len(request.ids) - len(part))
                    yield turn.owner, part[n_computed:]

        self.hooks.rows = rows
        try:
            return super()._prefill(requests, prefixes, patches)
        finally:
            self.hooks.rows = None
            for request in requests:
                for turn in self.turns.get(id(request), ()):
                    self.computed[turn.owner] = len(request.ids)

    def decode(self, version: int) -> None:
        # Rows that are done stay in the batch for a while, and what they get is nothing.
        decoded = [None if row.done else self._turn(row).owner for row in self.rows]

        def rows(tensor: torch.Tensor) -> Iterator[tuple[Owner, torch.Tensor]]:
            for owner, part in zip(decoded, tensor.split(1), strict=True):
                if owner is not None:
                    yield owner, part

        self.hooks.rows = rows
        self.computed.update(owner for owner in decoded if owner is not None)
        try:
            super().decode(version)
        finally:
            self.hooks.rows = None

    def _sampler_of(self, rows: Sequence[Row]) -> Sampler:
        return _ForcedSampler([row.pending.request.sampling for row in rows], self.banned)

    def _draw(self, first: int, logits: torch.Tensor, sampler: Sampler, version: int) -> None:
        assert isinstance(sampler, _ForcedSampler)
        rows = self.rows[first:]
        forced = []
        for row in rows:
            ids = self._turn(row).ids
            forced.append(int(ids[min(len(row.ids), len(ids) - 1)]))
        sampler.forced = torch.tensor(forced, dtype=torch.int64)

        def put(quantity: Quantity, values: torch.Tensor) -> None:
            for row, value in zip(rows, values.split(1), strict=True):
                if not row.done:
                    self.hooks.trace.append(quantity, self._turn(row).owner, as_array(value))

        sampler.put = put
        super()._draw(first, logits, sampler, version)
        for number, row in enumerate(rows, first):
            if not row.done and len(row.ids) >= len(self._turn(row).ids):
                self._store_in_sessions([number])
                row.finish()


class ForcedStep:
    """Computes the forward of a recorded step with a `TorchEngine` on the CPU.

    Its weights are those that the trainer sends (`Trainer.weights`); weights that are trained, and
    that the trainer does not send, are zeros.
    """

    def __init__(
        self, subject: Subject, step: RecordedStep, temperature: float, dtype: torch.dtype
    ) -> None:
        self.subject = subject
        self.step = step
        self.temperature = temperature
        self.dtype = dtype

    def run(
        self, sent_weights: Iterable[tuple[str, torch.Tensor]], trained: Iterable[str]
    ) -> Trace:
        """Return the trace of the engine.

        Args:
            sent_weights: names and values of the weights that the trainer sends.
            trained: names of the weights that it trains.
        """
        subject, trace = self.subject, Trace()
        model = subject.packed_model(self.dtype)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name in trained:
                parameters[name].zero_()
        engine = TorchEngine(
            model,
            subject.family,
            banned=subject.banned,
            pixels=subject.pixels,
            image_tokens=subject.image_tokens,
            max_running=1024,
        )
        try:
            batch = _ForcedBatch(
                model,
                subject.family,
                engine.batch.banned,
                subject.image_tokens,
                engine.device,
                engine.sessions,
                lambda: FREE_BYTES,
                None,
            )
            batch.hooks = hooks = Hooks(model, subject.family, trace)
            hooks.append = True
            batch.computed = Counter()
            engine.batch = batch
            engine.load_weights([dict(sent_weights)], self.step.version)
            for name, weight in parameters.items():
                trace.put(Quantity.of("engine weights"), name, as_array(weight))
            for requests in self._requests(batch):
                engine.generate(requests)
            hooks.remove()
        finally:
            engine.close()
        return trace

    def _requests(self, batch: _ForcedBatch) -> Iterator[list[Request]]:
        """Yield the requests of each turn number: those of later turns go on from earlier ones in
        the engine's sessions."""
        turns = forced_turns(self.step)
        batch.turns = by_request = {}
        for number in range(max((len(t) for t in turns.values()), default=0)):
            by_prompt: dict[tuple, list[ForcedTurn]] = defaultdict(list)
            for owner, own_turns in turns.items():
                if number < len(own_turns):
                    turn = own_turns[number]
                    sequence = self._sequence(owner)
                    hashes = tuple(image.hash for image, _ in sequence.images)
                    alone = owner if number else owner[0]
                    by_prompt[alone, sequence.ids[: turn.start].tobytes(), hashes].append(turn)
            requests = []
            for prompt_turns in by_prompt.values():
                requests.append(self._request(prompt_turns))
                by_request[id(requests[-1])] = prompt_turns
            yield requests

    def _sequence(self, owner: Owner) -> Any:
        g, i, k = owner
        return self.step.groups[int(g)].trajectories[int(i)].sequences[int(k)]

    def _request(self, turns: Sequence[ForcedTurn]) -> Request:
        sequence, start = self._sequence(turns[0].owner), turns[0].start
        tokens = self.subject.image_tokens
        # The images of the prompt: those whose placeholders stand before its end.
        counts = tokens(np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3))
        n_placeholders = int(tokens.mask(sequence.ids[:start]).sum())
        n_images = int(np.searchsorted(np.cumsum(counts), n_placeholders, side="right"))
        prompt_images = sequence.images[:n_images]
        return Request(
            sequence.ids[:start].astype(np.int32),
            tuple(image for image, _ in prompt_images),
            np.array([grid for _, grid in prompt_images], np.int32).reshape(-1, 3),
            SamplingParams(self.temperature, max_new_tokens=max(t.end - t.start for t in turns)),
            tuple(range(len(turns))),
            tuple(f"{turn.owner}" for turn in turns),
        )


def forced_turns(step: RecordedStep) -> dict[Owner, list[ForcedTurn]]:
    """Return the runs of sampled tokens of every trained sequence, in order.

    A sequence with images between two runs is computed up to there, as its own engine prefills
    further prompts behind a session: that is the next turn.
    """
    turns: dict[Owner, list[ForcedTurn]] = {}
    trained = [number for mini in step.minibatches for number in mini.trajectories]
    for g, i in trained:
        trajectory = step.groups[g].trajectories[i]
        for k, sequence in enumerate(trajectory.sequences):
            edges = np.flatnonzero(np.diff(sequence.loss_mask.astype(np.int8), append=0))
            starts, ends = edges[::2] + 1, edges[1::2] + 1
            turns[g, i, k] = [
                ForcedTurn((g, i, k), int(start), int(end), sequence.ids[start:end])
                for start, end in zip(starts, ends, strict=True)
            ]
    return turns
