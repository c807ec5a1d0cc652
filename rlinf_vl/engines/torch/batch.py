"""The rows that the torch engine is decoding, on the model: prefilled, decoded by a token each, computed again by new weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from rlinf_vl.engines.torch.decode import DecodeCache
from rlinf_vl.engines.torch.prefill import PrefillAttention, prefill
from rlinf_vl.engines.torch.rows import Pending, Row
from rlinf_vl.engines.torch.sampling import Sampler, uniforms
from rlinf_vl.engines.torch.sessions import Kept, Sessions
from rlinf_vl.models.families import Family, Mixture, VisionFeatures
from rlinf_vl.models.loading import output_weight
from rlinf_vl.models.mixture import Routing
from rlinf_vl.models.policy import encode_images
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.observe.spans import span
from rlinf_vl.types import ImageRef, Request

T = TypeVar("T")

#: Bytes of images' features that stay for requests which show the same images, until weights of the vision tower come.
FEATURE_BYTES = 2**28

#: Prompt tokens prefilled at once.
PREFILL_TOKENS = 8192
#: Finished rows are dropped when they are this share of all (or when their room is wanted).
DROP_SHARE = 0.2


class Batch:
    """Rows S, those of a request one after the other, with what they need for their next token."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        banned: torch.Tensor,
        image_token_id: int,
        merge_size: int,
        device: torch.device,
        sessions: Sessions,
        room: Callable[[], int],
        mixture: Mixture | None,
    ) -> None:
        """`banned`: bool [V], on the device. `room`: bytes for sessions and more rows. `mixture`: samples have its routes."""
        self.model = model
        self.family = family
        self.text_model: Any = model.get_submodule(family.text_model)
        self.banned = banned
        self.image_token_id = image_token_id
        self.merge_size = merge_size
        self.device = device
        self.sessions = sessions
        self.room = room
        self.mixture = mixture
        self.prefilled_tokens = 0
        self.decode_state = family.decode_state(model.config)
        self.cache = DecodeCache(self.decode_state, model.dtype, device)
        self.images = VisionCache(FEATURE_BYTES, device)
        self.rows: list[Row] = []
        self.sampler: Sampler | None = None  # of these rows, as are their next positions and last ids, int64 [S]
        self.next_positions = torch.zeros(0, dtype=torch.int64, device=device)
        self.last_ids = torch.zeros(0, dtype=torch.int64, device=device)

    def begin(self, admitted: Sequence[Pending], version: int) -> None:
        """Prefill these requests, and draw their first tokens by the weights of this version."""
        self.drop_finished()
        first = len(self.rows)
        for pending in admitted:  # from here on a failure reaches their futures
            n = pending.request.sampling.max_new_tokens
            self.rows += [Row(pending, i, uniforms(seed, n).tolist()) for i, seed in enumerate(pending.request.seeds)]
        samples = [len(pending.request.seeds) for pending in admitted]
        hidden, positions = self._append(admitted, samples)
        for pending in admitted:
            pending.kept = None
        counts = torch.tensor(samples, device=self.device)
        self.next_positions = torch.cat([self.next_positions, positions.repeat_interleave(counts)])
        self.last_ids = torch.cat([self.last_ids, self.last_ids.new_zeros(len(self.rows) - first)])
        self.sampler = self._sampler_of(self.rows)
        logits = self._logits(hidden).repeat_interleave(counts, dim=0)
        self._draw(first, logits, self._sampler_of(self.rows[first:]), version)

    def decode(self, version: int) -> None:
        """One token for every row, by the weights of this version."""
        with span("decode"):
            embeds = self.text_model.get_input_embeddings()(self.last_ids).unsqueeze(1)
            self.cache.begin_step()
            positions = self.next_positions.view(1, -1, 1).expand(4, -1, 1)
            routing = self._routing()
            more: dict[str, Any] = {} if routing is None else {"routing": routing}
            forward = self.family.text_forward
            hidden = forward(self.text_model, embeds, positions, None, (), context=self.cache, **more)[:, 0]
            if routing is not None:
                for row, own in zip(self.rows, self._taken(routing), strict=True):
                    if not row.over:
                        row.routes.append(own)
            self.next_positions = self.next_positions + 1
            assert self.sampler is not None
            self._draw(0, self._logits(hidden), self.sampler, version)
            if sum(row.over for row in self.rows) >= DROP_SHARE * len(self.rows):
                self.drop_finished()

    def recompute(self, pixels: Callable[[ImageRef], np.ndarray]) -> None:
        """Compute keys, values, states and routes of all rows again, as the weights have changed: of a prompt with its row where it
        has one; else of the prompt, once, then of what each row has sampled. Ids, logprobs and versions stay."""
        self.drop_finished()
        self.cache = DecodeCache(self.decode_state, self.model.dtype, self.device)
        asked = [list(rows) for _, rows in groupby(range(len(self.rows)), key=lambda i: id(self.rows[i].pending))]
        for part in _in_parts(asked, [self.rows[rows[0]].length for rows in asked]):
            firsts = [self.rows[rows[0]] for rows in part]
            for row in firsts:
                row.pending.patches = self.patches(row.pending.request.images, pixels)
            only = [row if len(rows) == 1 else None for row, rows in zip(firsts, part, strict=True)]
            self._append([row.pending for row in firsts], list(map(len, part)), only)
        begun = [i for rows in asked if len(rows) > 1 for i in rows if len(self.rows[i].ids) > 1]
        for part in _in_parts(begun, [self.rows[i].length for i in begun]):
            self._restore(part)

    def leave_cancelled(self) -> None:
        """Draw nothing more for requests that nobody waits for."""
        for row in self.rows:
            row.over = row.over or row.pending.future.cancelled()

    def clear(self) -> None:
        """Drop all rows, with the memory that was taken for any, and the images' features."""
        self.rows, self.sampler = [], None
        self.next_positions, self.last_ids = self.next_positions[:0], self.last_ids[:0]
        self.cache = DecodeCache(self.decode_state, self.model.dtype, self.device)
        self.images.clear()

    def drop_finished(self) -> None:
        alive = [i for i, row in enumerate(self.rows) if not row.over]
        if len(alive) < len(self.rows):
            keep = torch.tensor(alive, dtype=torch.int64, device=self.device)
            self.cache.keep(keep)
            self.rows = [self.rows[i] for i in alive]
            self.next_positions = self.next_positions[keep]
            self.last_ids = self.last_ids[keep]
            self.sampler = self._sampler_of(self.rows)

    def patches(self, images: Sequence[ImageRef], pixels: Callable[[ImageRef], np.ndarray]) -> dict[str, np.ndarray]:
        """Of those images, by hash, whose features are not at hand."""
        missing = set(self.images.missing(image.hash for image in images))
        return {image.hash: pixels(image) for image in images if image.hash in missing}

    def kept(self, session: str, request: Request) -> Kept | None:
        """What its session has of the request."""
        return self.sessions.find(session, request, self.image_token_id)

    def _append(
        self, asked: Sequence[Pending], samples: list[int], only: Sequence[Row | None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill the prompts of these requests, and add `samples[i]` rows of each to the cache; hidden states and positions of
        `prefill`. `only[i]`: the request's only row, which is prefilled, too, but for its last token."""
        patches = {name: array for pending in asked for name, array in pending.patches.items()}
        rows = only or [None] * len(asked)
        requests = [p.request if row is None else row.so_far for p, row in zip(asked, rows, strict=True)]
        kept = [pending.kept for pending in asked]
        hidden, positions, computed, routes = self._prefill(requests, kept, patches)
        for pending, row, own in zip(asked, rows, routes, strict=True):
            old = pending.kept.routes if pending.kept else None
            both = own if old is None or own is None else np.concatenate([old, own])
            n = len(pending.request.ids)
            pending.routes = None if both is None else both[:n]
            if row is not None:
                row.routes = [] if both is None else list(both[n:])
        self.cache.append(
            computed.tokens, computed.sequences(), [len(p.request.ids) for p in asked], samples, computed.states
        )
        return hidden, positions

    def _restore(self, indices: Sequence[int]) -> None:
        """Prefill what these rows have sampled, behind their prompts, which the cache has. The last token is not computed yet."""
        rows = torch.tensor(indices, dtype=torch.int64, device=self.device)
        restored, nothing = [self.rows[i] for i in indices], [0] * len(indices)
        prompts = self.cache.cut(indices, nothing, nothing)
        kept = [
            Kept.of(row.pending.request, [], (prompt,), self.cache.state(i))
            for i, row, prompt in zip(indices, restored, prompts, strict=True)
        ]
        requests = [row.so_far for row in restored]
        _, _, computed, routes = self._prefill(requests, kept, {})
        own = [tokens[len(k.ids) :] for tokens, k in zip(computed.sequences(), kept, strict=True)]
        self.cache.restore(rows, computed.tokens, own, computed.states)
        for row, taken in zip(restored, routes, strict=True):
            row.routes = [] if taken is None else list(taken)

    def _prefill(
        self, requests: Sequence[Request], kept: Sequence[Kept | None], patches: Mapping[str, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, PrefillAttention, Sequence[np.ndarray | None]]:
        """As `prefill`; and the routes of each request's new tokens, [·, L·k], if they are reported."""
        routing = self._routing()
        with span("prefill"):
            features = self._features(requests, kept, patches)
            image_token = self.image_token_id, self.merge_size
            hidden, positions, computed = prefill(
                self.model, self.family, requests, kept, features, *image_token, self.device, routing
            )
        self.prefilled_tokens += sum(computed.lengths)
        routes: Sequence[np.ndarray | None] = [None] * len(requests)
        if routing is not None:
            routes = np.split(self._taken(routing), np.cumsum(computed.lengths)[:-1])
        return hidden, positions, computed, routes

    def _features(
        self, requests: Sequence[Request], kept: Sequence[Kept | None], patches: Mapping[str, np.ndarray]
    ) -> VisionFeatures | None:
        """Of the images that are new in these requests, end to end; the tower sees each image once, however often it is shown."""
        shown: list[tuple[str, np.ndarray]] = []
        for request, old in zip(requests, kept, strict=True):
            pairs = zip((image.hash for image in request.images), request.image_grids, strict=True)
            shown += list(pairs)[len(old.images) if old else 0 :]
        if not shown:
            return None
        grids = dict(shown)
        self.images.pin(grids)
        if missing := self.images.missing(grids):
            tower_input = np.concatenate([patches[name] for name in missing])
            of_missing = np.stack([grids[name] for name in missing]).astype(np.int64)
            features = encode_images(self.model, self.family, tower_input, of_missing, self.device)
            self.images.put(missing, features, (of_missing.prod(axis=1) // self.merge_size**2).tolist())
        return self.images.get([name for name, _ in shown])

    def _routing(self) -> Routing | None:
        return None if self.mixture is None else Routing(record=True)

    def _taken(self, routing: Routing) -> np.ndarray:
        """[T, L·k], of a forward."""
        assert self.mixture is not None
        return torch.stack(routing.taken, dim=1).flatten(1).cpu().numpy().astype(self.mixture.dtype)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = output_weight(self.model)
        if weight.is_cuda and weight.dtype != torch.float32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    def _sampler_of(self, rows: Sequence[Row]) -> Sampler:
        return Sampler([row.pending.request.sampling for row in rows], self.banned)

    def _draw(self, first: int, logits: torch.Tensor, sampler: Sampler, version: int) -> None:
        """Draw a token for each row from `first` on; finish rows at a stop id or at their length."""
        rows = self.rows[first:]
        u = torch.tensor([row.u[min(len(row.ids), len(row.u) - 1)] for row in rows], device=self.device)
        ids, logprobs = sampler(logits, u)
        self.last_ids[first:] = ids
        finished = []
        for i, (row, token, logprob) in enumerate(zip(rows, ids.tolist(), logprobs.tolist(), strict=True), first):
            if row.over:
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            sampling = row.pending.request.sampling
            if token in sampling.stop_ids or len(row.ids) >= sampling.max_new_tokens:
                finished.append(i)
        if kept := [i for i in finished if self.rows[i].pending.request.sessions]:
            self._keep(kept)
        for i in finished:
            self.rows[i].finish()

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep all that was computed for these rows in their sessions."""
        names = [self.rows[i].pending.request.sessions[self.rows[i].number] for i in rows]
        before: list[Kept] = []
        for i, name in zip(rows, names, strict=True):
            pending = self.rows[i].pending
            known = self.kept(name, pending.request) or pending.kept
            if known is None:  # the prompt, kept once for all samples
                (prompt,) = self.cache.cut([i], [0], [0])
                known = pending.kept = Kept.of(pending.request, [], (prompt,), routes=pending.routes)
            before.append(known)
        sampled = [len(self.rows[i].ids) - 1 for i in rows]
        parts = self.cache.cut(rows, [len(known.ids) for known in before], sampled)
        for i, name, known, part in zip(rows, names, before, parts, strict=True):
            row, state = self.rows[i], self.cache.state(i)
            of_row = row.ids[:-1], (*known.parts, part), state, row.all_routes(0)
            self.sessions.put(name, Kept.of(row.pending.request, *of_row))
        self.sessions.shrink(self.room())


def _in_parts(items: Sequence[T], tokens: Sequence[int]) -> Iterator[list[T]]:
    """Items in order, as many at a time as have `PREFILL_TOKENS` in all; one at least."""
    part: list[T] = []
    total = 0
    for item, n in zip(items, tokens, strict=True):
        if part and total + n > PREFILL_TOKENS:
            yield part
            part, total = [], 0
        part.append(item)
        total += n
    if part:
        yield part
