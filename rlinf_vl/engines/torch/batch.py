"""The rows that the torch engine decodes: prefill, decoding steps, and recomputation after an
update."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from rlinf_vl.engines.torch.decode import DecodeCache
from rlinf_vl.engines.torch.prefill import PrefillAttention, prefill
from rlinf_vl.engines.torch.prefix_cache import CachedPrefix, PrefixCache
from rlinf_vl.engines.torch.rows import Pending, Row
from rlinf_vl.engines.torch.sampling import Sampler, uniforms
from rlinf_vl.models.family import Family, VisionFeatures
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.loading import output_weight
from rlinf_vl.models.mixture import ROUTES, Routing
from rlinf_vl.models.policy import encode_images
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.observe.spans import span
from rlinf_vl.types import ImageRef, Request

T = TypeVar("T")

#: Bytes of image features cached for requests with the same images, until the vision tower's
#: weights change.
FEATURE_BYTES = 2**28

#: Prompt tokens prefilled at once.
PREFILL_TOKENS = 8192
#: Finished rows are dropped when they are this share of all (or when new requests need their
#: memory).
DROP_SHARE = 0.2


class Batch:
    """The rows S being decoded, those of a request one after the other, with their caches and
    samplers."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        banned: torch.Tensor,
        image_tokens: ImageTokens,
        device: torch.device,
        sessions: PrefixCache,
        free_bytes: Callable[[], int],
        mixture: Mixture | None,
    ) -> None:
        """Make an empty batch.

        Args:
            banned: ids that are never sampled: bool [V], on the device.
            free_bytes: returns the bytes available for sessions and further rows.
            mixture: given if samples have the column `ROUTES`: the experts of the model.
        """
        self.model = model
        self.family = family
        self.text_model: Any = model.get_submodule(family.text_model)
        self.banned = banned
        self.image_tokens = image_tokens
        self.device = device
        self.sessions = sessions
        self.free_bytes = free_bytes
        self.mixture = mixture
        self.prefilled_tokens = 0
        self.decode_state = family.decode_state(model.config)
        self.cache = DecodeCache(self.decode_state, model.dtype, device)
        self.images = VisionCache(FEATURE_BYTES, device)
        self.rows: list[Row] = []
        # One entry per row: sampling parameters, next position and last id, int64 [S].
        self.sampler: Sampler | None = None
        self.next_positions = torch.zeros(0, dtype=torch.int64, device=device)
        self.last_ids = torch.zeros(0, dtype=torch.int64, device=device)

    def begin(self, admitted: Sequence[Pending], version: int) -> None:
        """Prefill these requests and draw their first tokens. `version`: of the current weights."""
        self.drop_finished()
        first = len(self.rows)
        for pending in admitted:  # first, because a failure reaches the futures through the rows
            n = pending.request.sampling.max_new_tokens
            self.rows += [
                Row(pending, i, uniforms(seed, n).tolist())
                for i, seed in enumerate(pending.request.seeds)
            ]
        samples = [len(pending.request.seeds) for pending in admitted]
        hidden, positions = self._append(admitted, samples)
        for pending in admitted:
            pending.prefix = None
        counts = torch.tensor(samples, device=self.device)
        self.next_positions = torch.cat([self.next_positions, positions.repeat_interleave(counts)])
        self.last_ids = torch.cat([self.last_ids, self.last_ids.new_zeros(len(self.rows) - first)])
        self.sampler = self._sampler_of(self.rows)
        logits = self._logits(hidden).repeat_interleave(counts, dim=0)
        self._draw(first, logits, self._sampler_of(self.rows[first:]), version)

    def decode(self, version: int) -> None:
        """Draw one token for every row. `version`: of the current weights."""
        with span("decode"):
            embeds = self.text_model.get_input_embeddings()(self.last_ids).unsqueeze(1)
            self.cache.begin_step()
            positions = self.next_positions.view(1, -1, 1).expand(4, -1, 1)
            routing = self._routing()
            # A family without experts has no `routing` parameter.
            keywords: dict[str, Any] = {} if routing is None else {"routing": routing}
            forward = self.family.text_forward
            hidden = forward(
                self.text_model, embeds, positions, None, (), context=self.cache, **keywords
            )[:, 0]
            for name, values in self._recorded_columns(routing).items():
                for row, value in zip(self.rows, values, strict=True):
                    if not row.done:
                        row.columns.setdefault(name, []).append(value)
            self.next_positions = self.next_positions + 1
            assert self.sampler is not None
            self._draw(0, self._logits(hidden), self.sampler, version)
            if sum(row.done for row in self.rows) >= DROP_SHARE * len(self.rows):
                self.drop_finished()

    def recompute(self, pixels: Callable[[ImageRef], np.ndarray]) -> None:
        """Recompute keys, values, states and columns of all rows after a change of weights.

        A prompt with one row is computed together with the row's tokens. A prompt with several rows
        is computed once, and then the sampled tokens of each row. Ids, logprobs and versions stay.
        """
        self.drop_finished()
        self.cache = DecodeCache(self.decode_state, self.model.dtype, self.device)
        by_request = groupby(range(len(self.rows)), key=lambda i: id(self.rows[i].pending))
        groups = [list(indices) for _, indices in by_request]
        for chunk in _prefill_chunks(groups, [self.rows[indices[0]].length for indices in groups]):
            first_rows = [self.rows[indices[0]] for indices in chunk]
            for row in first_rows:
                row.pending.patches = self.patches(row.pending.request.images, pixels)
            sole_rows = [
                row if len(indices) == 1 else None
                for row, indices in zip(first_rows, chunk, strict=True)
            ]
            self._append([row.pending for row in first_rows], list(map(len, chunk)), sole_rows)
        # The last sampled token is not computed yet: a row of one token needs its prompt only.
        continued = [
            i
            for indices in groups
            if len(indices) > 1
            for i in indices
            if len(self.rows[i].ids) > 1
        ]
        for chunk in _prefill_chunks(continued, [self.rows[i].length for i in continued]):
            self._restore(chunk)

    def finish_cancelled(self) -> None:
        """Draw no more tokens for cancelled requests."""
        for row in self.rows:
            row.done = row.done or row.pending.future.cancelled()

    def clear(self) -> None:
        """Drop all rows, the memory of their caches, and the cached image features."""
        self.rows, self.sampler = [], None
        self.next_positions, self.last_ids = self.next_positions[:0], self.last_ids[:0]
        self.cache = DecodeCache(self.decode_state, self.model.dtype, self.device)
        self.images.clear()

    def drop_finished(self) -> None:
        """Remove the rows that are done from the batch and its caches."""
        alive = [i for i, row in enumerate(self.rows) if not row.done]
        if len(alive) < len(self.rows):
            keep = torch.tensor(alive, dtype=torch.int64, device=self.device)
            self.cache.keep(keep)
            self.rows = [self.rows[i] for i in alive]
            self.next_positions = self.next_positions[keep]
            self.last_ids = self.last_ids[keep]
            self.sampler = self._sampler_of(self.rows)

    def patches(
        self, images: Sequence[ImageRef], pixels: Callable[[ImageRef], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return, by image hash, the pixels of the images whose features are not cached."""
        missing = set(self.images.missing(image.hash for image in images))
        return {image.hash: pixels(image) for image in images if image.hash in missing}

    def cached_prefix(self, session: str, request: Request) -> CachedPrefix | None:
        """Return the part of the session's cache entry that the request begins with, or None."""
        return self.sessions.find(session, request, self.image_tokens.placeholder_ids)

    def _append(
        self,
        admitted: Sequence[Pending],
        samples: list[int],
        sole_rows: Sequence[Row | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill the prompts of these requests, and add `samples[i]` rows of each to the cache.

        Args:
            admitted: the requests.
            samples: rows of each.
            sole_rows: for a request with one row, that row, whose sampled tokens are prefilled as
                well, except the last one.

        Returns:
            Hidden states and positions, as from `prefill`.
        """
        patches = {name: array for pending in admitted for name, array in pending.patches.items()}
        rows = sole_rows or [None] * len(admitted)
        requests = [
            p.request if row is None else row.computed_request
            for p, row in zip(admitted, rows, strict=True)
        ]
        prefixes = [pending.prefix for pending in admitted]
        hidden, positions, computed, columns = self._prefill(requests, prefixes, patches)
        for pending, row, new_columns in zip(admitted, rows, columns, strict=True):
            prefix_columns = pending.prefix.columns if pending.prefix else {}
            n = len(pending.request.ids)
            for name, new_column in new_columns.items():
                prefix_column = prefix_columns.get(name, new_column[:0])
                column = np.concatenate([prefix_column, new_column])
                pending.columns[name] = column[:n]
                if row is not None:
                    row.columns[name] = list(column[n:])
        prompt_lengths = [len(pending.request.ids) for pending in admitted]
        self.cache.append(
            computed.tokens, computed.sequences(), prompt_lengths, samples, computed.states
        )
        return hidden, positions

    def _restore(self, indices: Sequence[int]) -> None:
        """Prefill the sampled tokens of these rows, except the last one, behind their prompts in
        the cache."""
        restored = [self.rows[i] for i in indices]
        zeros = [0] * len(indices)
        prompts = self.cache.copy_tokens(indices, zeros, zeros)
        prefixes = [
            CachedPrefix.from_request(row.pending.request, [], (prompt,), self.cache.state(i))
            for i, row, prompt in zip(indices, restored, prompts, strict=True)
        ]
        requests = [row.computed_request for row in restored]
        _, _, computed, columns = self._prefill(requests, prefixes, {})
        sampled = [
            tokens[len(prefix.ids) :]
            for tokens, prefix in zip(computed.sequences(), prefixes, strict=True)
        ]
        row_numbers = torch.tensor(indices, dtype=torch.int64, device=self.device)
        self.cache.restore(row_numbers, computed.tokens, sampled, computed.states)
        for row, row_columns in zip(restored, columns, strict=True):
            row.columns = {name: list(column) for name, column in row_columns.items()}

    def _prefill(
        self,
        requests: Sequence[Request],
        prefixes: Sequence[CachedPrefix | None],
        patches: Mapping[str, np.ndarray],
    ) -> tuple[torch.Tensor, torch.Tensor, PrefillAttention, list[dict[str, np.ndarray]]]:
        """Return the result of `prefill`, and the columns of each request's new tokens [·, …]."""
        routing = self._routing()
        with span("prefill"):
            features = self._features(requests, prefixes, patches)
            hidden, positions, computed = prefill(
                self.model,
                self.family,
                requests,
                prefixes,
                features,
                self.image_tokens,
                self.device,
                routing,
            )
        self.prefilled_tokens += sum(computed.lengths)
        columns: list[dict[str, np.ndarray]] = [{} for _ in requests]
        for name, column in self._recorded_columns(routing).items():
            parts = np.split(column, np.cumsum(computed.lengths)[:-1])
            for request_columns, part in zip(columns, parts, strict=True):
                request_columns[name] = part
        return hidden, positions, computed, columns

    def _features(
        self,
        requests: Sequence[Request],
        prefixes: Sequence[CachedPrefix | None],
        patches: Mapping[str, np.ndarray],
    ) -> VisionFeatures | None:
        """Return the features of the images outside the prefixes, end to end, or None without such
        images.

        The tower encodes each image once, however often the requests repeat it.
        """
        new_images: list[tuple[str, np.ndarray]] = []  # hash and grid
        for request, prefix in zip(requests, prefixes, strict=True):
            hashes_and_grids = zip(
                (image.hash for image in request.images), request.image_grids, strict=True
            )
            new_images += list(hashes_and_grids)[len(prefix.images) if prefix else 0 :]
        if not new_images:
            return None
        grids = dict(new_images)
        self.images.pin(grids)
        if missing := self.images.missing(grids):
            tower_input = np.concatenate([patches[name] for name in missing])
            missing_grids = np.stack([grids[name] for name in missing]).astype(np.int64)
            features = encode_images(
                self.model, self.family, tower_input, missing_grids, self.device
            )
            self.images.put(missing, features, self.image_tokens(missing_grids).tolist())
        return self.images.get([name for name, _ in new_images])

    def _routing(self) -> Routing | None:
        return None if self.mixture is None else Routing(record=True)

    def _recorded_columns(self, routing: Routing | None) -> dict[str, np.ndarray]:
        """Return the columns that a forward recorded of its T tokens: [T, …]."""
        if routing is None or self.mixture is None:
            return {}
        experts = torch.stack(routing.used_experts, dim=1).flatten(1).cpu().numpy()
        return {ROUTES: experts.astype(self.mixture.dtype)}

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = output_weight(self.model)
        if weight.is_cuda and weight.dtype != torch.float32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    def _sampler_of(self, rows: Sequence[Row]) -> Sampler:
        return Sampler([row.pending.request.sampling for row in rows], self.banned)

    def _draw(self, first: int, logits: torch.Tensor, sampler: Sampler, version: int) -> None:
        """Draw a token for each row from `first` on; finish rows at a stop id or at their maximal
        length."""
        rows = self.rows[first:]
        u = torch.tensor(
            [row.u[min(len(row.ids), len(row.u) - 1)] for row in rows], device=self.device
        )
        ids, logprobs = sampler(logits, u)
        self.last_ids[first:] = ids
        finished = []
        for i, (row, token, logprob) in enumerate(
            zip(rows, ids.tolist(), logprobs.tolist(), strict=True), first
        ):
            if row.done:
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            sampling = row.pending.request.sampling
            if token in sampling.stop_ids or len(row.ids) >= sampling.max_new_tokens:
                finished.append(i)
        if with_sessions := [i for i in finished if self.rows[i].pending.request.sessions]:
            self._store_in_sessions(with_sessions)
        for i in finished:
            self.rows[i].finish()

    def _store_in_sessions(self, rows: Sequence[int]) -> None:
        """Store the keys, values, states and columns of these rows in their sessions."""
        names = [self.rows[i].pending.request.sessions[self.rows[i].number] for i in rows]
        prefixes: list[CachedPrefix] = []
        for i, name in zip(rows, names, strict=True):
            pending = self.rows[i].pending
            prefix = self.cached_prefix(name, pending.request) or pending.prefix
            if prefix is None:  # the prompt is stored once for all samples of the request
                (prompt,) = self.cache.copy_tokens([i], [0], [0])
                prefix = pending.prefix = CachedPrefix.from_request(
                    pending.request, [], (prompt,), columns=pending.columns
                )
            prefixes.append(prefix)
        sampled = [len(self.rows[i].ids) - 1 for i in rows]
        new_parts = self.cache.copy_tokens(rows, [len(prefix.ids) for prefix in prefixes], sampled)
        for i, name, prefix, new_part in zip(rows, names, prefixes, new_parts, strict=True):
            row = self.rows[i]
            parts = (*prefix.parts, new_part)
            states = self.cache.state(i)
            entry = CachedPrefix.from_request(
                row.pending.request, row.ids[:-1], parts, states, row.columns_padded(0)
            )
            self.sessions.put(name, entry)
        self.sessions.shrink(self.free_bytes())


def _prefill_chunks(items: Sequence[T], tokens: Sequence[int]) -> Iterator[list[T]]:
    """Yield the items in order, in lists of at most `PREFILL_TOKENS` tokens or of one item."""
    chunk: list[T] = []
    total = 0
    for item, n in zip(items, tokens, strict=True):
        if chunk and total + n > PREFILL_TOKENS:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += n
    if chunk:
        yield chunk
