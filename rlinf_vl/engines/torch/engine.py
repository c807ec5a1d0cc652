"""The embedded engine: continuous batching on the transformers model itself, for machines without SGLang.

One thread runs the model. Waiting requests are admitted whenever rows are free (prompts prefilled together as one packed
row, each once), every step decodes one token of every row, finished rows are dropped and their places given to what waits.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied
from rlinf_vl.engines.torch.decode import DecodeCache
from rlinf_vl.engines.torch.sampling import Sampler, uniforms
from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.families import Family
from rlinf_vl.models.loading import output_weight
from rlinf_vl.models.policy import encode_images, hidden_states
from rlinf_vl.observe.spans import span
from rlinf_vl.transport import broadcast
from rlinf_vl.transport.broadcast import WeightGroup
from rlinf_vl.transport.buckets import Label, fingerprint
from rlinf_vl.types import Completion, ImageRef, Request, Sample

log = logging.getLogger(__name__)

#: Prompt tokens prefilled at once.
PREFILL_TOKENS = 8192
#: Finished rows are dropped when they are this share of all (or when their places are wanted).
DROP_SHARE = 0.2


@dataclass
class _Waiting:
    request: Request
    future: Future
    samples: list[Sample | None] = field(default_factory=list)
    left: int = 0
    patches: list[np.ndarray] = field(default_factory=list)


@dataclass
class _Row:
    """One sample being drawn: its request, its place in it, its random numbers, and what it has so far."""

    owner: _Waiting
    place: int
    u: np.ndarray
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    done: bool = False


class TorchEngine:
    """An `Engine` on a transformers model of `family` (see `load_model`); owns the model and one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        *,
        banned: np.ndarray,
        pixels: Callable[[ImageRef], np.ndarray],
        image_token_id: int,
        merge_size: int,
        max_running: int,
        memory_share: float = 0.6,
        device: str = "cpu",
    ) -> None:
        """`banned`: bool [V], never sampled. `max_running`: most rows at once, further bounded so that a worst-case row
        of each fits in `memory_share` of the memory free now."""
        model.to(device)  # pyright: ignore[reportArgumentType]  # its decorator hides self
        self.model = model.eval().requires_grad_(False)
        self.family, self.pixels = family, pixels
        self.image_token_id, self.merge_size = image_token_id, merge_size
        self.device = torch.device(device)
        self.banned = torch.from_numpy(banned).to(device)
        self.max_running, self.memory_share = max_running, memory_share
        self.version = 0
        self.asleep: set[str] = set()  # tags of the memory that is released
        text = model.get_submodule(family.text_model)
        self.text_config: Any = text.config
        self.cache = self._new_cache()
        self.rows: list[_Row] = []
        self.waiting: deque[_Waiting] = deque()
        self.next_positions = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.last_ids = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.u = torch.zeros(0, 0, device=self.device)
        self.sampler: Sampler | None = None
        self._wake = threading.Condition()
        self._step_lock = threading.Lock()
        self._paused = self._closed = False
        self._weight_group: ProcessGroup | None = None
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # --- the protocol -------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Future]:
        assert not self.asleep, f"asked to generate while its memory is released: {sorted(self.asleep)}"
        entries = [_Waiting(r, Future(), [None] * len(r.seeds), len(r.seeds)) for r in requests]
        with self._wake:
            if self._closed:
                raise EngineDied("the engine is closed")
            self.waiting.extend(entries)
            self._wake.notify()
        return [entry.future for entry in entries]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [future.result() for future in self.submit(requests)]

    def load_weights(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        assert "weights" not in self.asleep, "asked to load weights while their memory is released"
        with self._step_lock, torch.no_grad():
            weights = dict(self.model.named_parameters())
            for bucket in buckets:
                for name, value in bucket.items():
                    if name not in weights or weights[name].shape != value.shape:
                        held = tuple(weights[name].shape) if name in weights else "no such weight"
                        raise ValueError(f"weight {name!r} {tuple(value.shape)} does not fit the engine's ({held})")
                    weights[name].copy_(value)
            self.version = version

    def join_weight_group(self, group: WeightGroup) -> None:
        if self._weight_group is not None:
            broadcast.leave(self._weight_group)
        self._weight_group = broadcast.join(group)

    def load_broadcast(self, labels: Sequence[Label], version: int) -> None:
        assert self._weight_group is not None, "no weight group was joined"
        self.load_weights(broadcast.receive(self._weight_group, labels, self.device), version)

    def fingerprint(self, names: Sequence[str]) -> int:
        weights = dict(self.model.named_parameters())
        with self._step_lock:
            return fingerprint(weights[name] for name in names)

    def pause(self) -> None:
        with self._wake:
            self._paused = True
        with self._step_lock:  # the step under way has ended
            pass

    def resume(self) -> None:
        with self._wake:
            self._paused = False
            self._wake.notify()

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """As `Engine.release_memory`. On the CPU the weights stay where they are."""
        with self._step_lock:
            assert all(row.done for row in self.rows) and not self.waiting, "memory is released between rollouts only"
            if "kv_cache" in tags:
                self._drop_finished()
                self.cache = self._new_cache()
            if "weights" in tags and self.device.type == "cuda":
                self.model.to("cpu")  # pyright: ignore[reportArgumentType]  # its decorator hides self
            self.asleep |= set(tags)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        with self._step_lock:
            if self.asleep & set(tags) & {"weights"}:
                self.model.to(self.device)  # pyright: ignore[reportArgumentType]  # its decorator hides self
            self.asleep -= set(tags)

    def alive(self, timeout_s: float = 30.0) -> bool:
        return self._thread.is_alive() and not self._closed

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        if self._weight_group is not None:
            broadcast.leave(self._weight_group)
            self._weight_group = None

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = EngineDied("the engine was closed")
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or (not self._paused and (self.rows or self.waiting)))
                    if self._closed:
                        break
                with self._step_lock, torch.inference_mode():
                    self._admit()
                    if self.rows:
                        with span("decode"):
                            self._decode()
        except BaseException as e:
            error = e
            log.exception("the torch engine failed")
        with self._wake:
            self._closed = True
            left = {id(row.owner): row.owner for row in self.rows} | {id(w): w for w in self.waiting}
        for owner in left.values():
            if not owner.future.done():
                owner.future.set_exception(error)

    def _new_cache(self) -> DecodeCache:
        c = self.text_config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return DecodeCache(c.num_hidden_layers, c.num_key_value_heads, head_dim, self.model.dtype, self.device)

    def _rows_that_fit(self, request: Request) -> int:
        """Rows of this request's size that the memory allows."""
        c = self.text_config
        per_token = 2 * c.num_hidden_layers * self.cache.own_k[0].shape[1] * self.cache.own_k[0].shape[3]
        per_row = per_token * self.model.dtype.itemsize * (request.sampling.max_new_tokens + len(request.ids))
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = psutil.virtual_memory().available
        return max(len(request.seeds), int(free * self.memory_share / per_row))

    def _admit(self) -> None:
        """Prefill as many waiting requests as there are places for, and draw their first tokens."""
        while self.waiting:
            busy = sum(not row.done for row in self.rows)
            admitted: list[_Waiting] = []
            tokens = 0
            while self.waiting:
                request = self.waiting[0].request
                places = min(self.max_running, busy + self._rows_that_fit(request)) - busy
                crowded = len(request.seeds) > places and (admitted or busy)
                if crowded or (admitted and tokens + len(request.ids) > PREFILL_TOKENS):
                    break
                entry = self.waiting.popleft()
                try:
                    entry.patches = [self.pixels(image) for image in request.images]
                except Exception as e:  # an image that can't be decoded is its request's error, nobody else's
                    entry.future.set_exception(e)
                    continue
                admitted.append(entry)
                tokens += len(request.ids)
                busy += len(request.seeds)
            if not admitted:
                return
            self._drop_finished()
            fresh = [
                _Row(entry, place, uniforms(seed, entry.request.sampling.max_new_tokens))
                for entry in admitted
                for place, seed in enumerate(entry.request.seeds)
            ]
            self.rows += fresh  # from here on a failure reaches their futures
            with span("prefill"):
                first_logits, positions = self._prefill(admitted)
            counts = torch.tensor([len(entry.request.seeds) for entry in admitted], device=self.device)
            self.next_positions = torch.cat([self.next_positions, positions.repeat_interleave(counts)])
            self.last_ids = torch.cat([self.last_ids, self.last_ids.new_zeros(len(fresh))])
            self._make_sampler()
            sampler = Sampler([row.owner.request.sampling for row in fresh], self.banned)
            first_u = torch.tensor([row.u[0] for row in fresh], device=self.device)
            ids, logprobs = sampler(first_logits.repeat_interleave(counts, dim=0), first_u)
            self._record(len(self.rows) - len(fresh), ids, logprobs)

    def _prefill(self, admitted: list[_Waiting]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the prompts as one packed row into the cache; float32 logits [n, V] behind each, and its next position [n]."""
        requests = [entry.request for entry in admitted]
        lengths = [len(r.ids) for r in requests]
        ids = np.concatenate([r.ids for r in requests]).astype(np.int64)
        positions = [
            self.family.positions(r.ids.astype(np.int64), self.image_token_id, r.image_grids, self.merge_size)
            for r in requests
        ]
        features = image_positions = None
        patches = [part for entry in admitted for part in entry.patches]
        if patches:
            image_positions = torch.from_numpy(np.flatnonzero(ids == self.image_token_id)).to(self.device)
            grids = np.concatenate([r.image_grids for r in requests if r.images]).astype(np.int64)
            features = encode_images(self.model, self.family, np.concatenate(patches), grids, self.device)
        cu_seqlens = np.cumsum([0, *lengths])
        context = SegmentAttention(cu_seqlens, device=self.device, dtype=self.model.dtype, capture=True)
        hidden = hidden_states(
            self.model,
            self.family,
            torch.from_numpy(ids).to(self.device),
            torch.from_numpy(np.concatenate(positions, axis=1)).to(self.device),
            context,
            features,
            image_positions,
        )
        assert context.captured is not None
        self.cache.append(context.captured, lengths, [len(r.seeds) for r in requests])
        last = torch.from_numpy(cu_seqlens[1:] - 1).to(self.device)
        following = torch.tensor([int(p[1:].max()) + 1 for p in positions], device=self.device)
        return self._logits(hidden[last]), following

    def _decode(self) -> None:
        """One token for every row."""
        text_model: Any = self.model.get_submodule(self.family.text_model)
        embeds = text_model.get_input_embeddings()(self.last_ids).unsqueeze(1)
        self.cache.begin_step()
        positions = self.next_positions.view(1, -1, 1).expand(4, -1, 1)
        hidden = self.family.text_forward(text_model, embeds, positions, None, (), context=self.cache)[:, 0]
        self.cache.end_step()
        self.next_positions = self.next_positions + 1
        steps = torch.tensor([min(len(row.ids), len(row.u) - 1) for row in self.rows], device=self.device)
        u = self.u.gather(1, steps[:, None]).squeeze(1)
        assert self.sampler is not None
        self._record(0, *self.sampler(self._logits(hidden), u))
        finished = sum(row.done for row in self.rows)
        if finished and (finished >= DROP_SHARE * len(self.rows)):
            self._drop_finished()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = output_weight(self.model)
        if weight.is_cuda and weight.dtype != torch.float32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    def _record(self, first: int, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append drawn tokens to the rows from `first` on; finish rows at a stop id or at their length."""
        self.last_ids[first:] = ids
        for row, token, logprob in zip(self.rows[first:], ids.tolist(), logprobs.tolist(), strict=True):
            if row.done:
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            sampling = row.owner.request.sampling
            if token in sampling.stop_ids:
                self._finish(row, "stop")
            elif len(row.ids) >= sampling.max_new_tokens:
                self._finish(row, "length")

    def _finish(self, row: _Row, reason: str) -> None:
        row.done = True
        owner = row.owner
        owner.samples[row.place] = Sample(
            np.asarray(row.ids, np.int32),
            np.asarray(row.logprobs, np.float32),
            np.asarray(row.versions, np.int32),
            reason,
        )
        owner.left -= 1
        if owner.left == 0 and not owner.future.cancelled():
            owner.future.set_result(Completion(tuple(sample for sample in owner.samples if sample is not None)))

    def _drop_finished(self) -> None:
        alive = [i for i, row in enumerate(self.rows) if not row.done]
        if len(alive) == len(self.rows):
            return
        keep = torch.tensor(alive, dtype=torch.int64, device=self.device)
        self.cache.keep(keep)
        self.rows = [self.rows[i] for i in alive]
        self.next_positions, self.last_ids = self.next_positions[keep], self.last_ids[keep]
        self._make_sampler()

    def _make_sampler(self) -> None:
        if not self.rows:
            return
        self.sampler = Sampler([row.owner.request.sampling for row in self.rows], self.banned)
        width = max(len(row.u) for row in self.rows)
        self.u = torch.from_numpy(np.stack([np.resize(row.u, width) for row in self.rows])).to(self.device)
