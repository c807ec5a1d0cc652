"""The embedded engine: continuous batching on the transformers model itself, for machines without SGLang.

One thread runs the model. Waiting requests are admitted whenever rows are free (prompts prefilled together as one packed
row, each once), every step decodes one token of every row, finished rows are dropped and their rows given to what waits. What
was computed for a session (`Request.sessions`) is kept for its next request, as long as there is room.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied
from rlinf_vl.engines.torch.decode import DecodeCache
from rlinf_vl.engines.torch.prefill import prefill
from rlinf_vl.engines.torch.rows import Pending, Row
from rlinf_vl.engines.torch.sampling import Sampler, uniforms
from rlinf_vl.engines.torch.sessions import Kept, Sessions
from rlinf_vl.models.families import Family
from rlinf_vl.models.loading import output_weight
from rlinf_vl.models.mixture import Routing
from rlinf_vl.observe.spans import span
from rlinf_vl.transport import broadcast
from rlinf_vl.transport.broadcast import WeightGroup
from rlinf_vl.transport.buckets import Label, fingerprint
from rlinf_vl.types import Completion, ImageRef, Request

log = logging.getLogger(__name__)

#: Prompt tokens prefilled at once.
PREFILL_TOKENS = 8192
#: Finished rows are dropped when they are this share of all (or when their room is wanted).
DROP_SHARE = 0.2


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
        report_routes: bool = False,
    ) -> None:
        """`banned`: bool [V], never sampled. `max_running`: most rows at once, further bounded so that a worst-case row
        of each fits in `memory_share` of the memory that is free or used for sessions; sessions use what is left of that.
        `report_routes`: samples have routes, if the model has mixtures."""
        model.to(device)  # pyright: ignore[reportArgumentType]  # its decorator hides self
        self.model = model.eval().requires_grad_(False)
        self.text_model: Any = model.get_submodule(family.text_model)
        self.family = family
        self.pixels = pixels
        self.image_token_id = image_token_id
        self.merge_size = merge_size
        self.max_running = max_running
        self.memory_share = memory_share
        self.device = torch.device(device)
        self.banned = torch.from_numpy(banned).to(device)
        self.version = 0
        self.prefilled_tokens = 0
        self.asleep: set[str] = set()  # tags of the memory that is released
        self.mixture = family.mixture(model.config) if report_routes else None
        self.decode_state = family.decode_state(model.config)
        self.cache = DecodeCache(self.decode_state, model.dtype, self.device)
        self.sessions = Sessions()
        self.waiting: deque[Pending] = deque()
        self.rows: list[Row] = []
        self.sampler: Sampler | None = None  # of these rows, as are their next positions and last ids, int64 [S]
        self.next_positions = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.last_ids = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._wake = threading.Condition()
        self._step_lock = threading.Lock()
        self._paused = False
        self._closed = False
        self._weight_group: ProcessGroup | None = None
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # --- the protocol -------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        assert not self.asleep, f"asked to generate while its memory is released: {sorted(self.asleep)}"
        pending = [Pending(request) for request in requests]
        self.sessions.begin(name for request in requests for name in request.sessions)
        with self._wake:
            if self._closed:
                raise EngineDied("the engine is closed")
            self.waiting.extend(pending)
            self._wake.notify()
        return [p.future for p in pending]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [future.result() for future in self.submit(requests)]

    def end_sessions(self, names: Sequence[str]) -> None:
        self.sessions.end(names)

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
            self.sessions.clear()
            for row in self.rows:
                row.pending.keeps = False

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
            wanted = [p for p in self.waiting if not p.future.cancelled()]
            assert all(row.over for row in self.rows) and not wanted, "memory is released between rollouts only"
            if "kv_cache" in tags:
                self._drop_finished()  # nothing is left in the cache
                self.sessions.clear()
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
                    while admitted := self._next_requests():
                        self._begin(admitted)
                    if self.rows:
                        with span("decode"):
                            self._decode()
        except BaseException as e:
            error = e
            log.exception("the torch engine failed")
        with self._wake:
            self._closed = True
            futures = {p.future for p in (*self.waiting, *(row.pending for row in self.rows))}
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _next_requests(self) -> list[Pending]:
        """Take as many waiting requests as there is room for and as are prefilled at once; one at least if nothing runs."""
        busy, tokens = sum(not row.over for row in self.rows), 0
        admitted: list[Pending] = []
        room = self._room() if self.waiting else 0
        while self.waiting:
            pending = self.waiting[0]
            if pending.future.cancelled():
                self.waiting.popleft()
                continue
            request = pending.request
            state, longest = self.decode_state, request.sampling.max_new_tokens + len(request.ids)
            per_row = state.token_bytes(self.model.dtype) * longest + state.row_bytes()
            n = len(request.seeds)
            if (busy + n > self.max_running or n * per_row > room) and (admitted or busy):
                break
            kept = self._kept(request.sessions[0], request) if n == 1 == len(request.sessions) else None
            new = len(request.ids) - (len(kept.ids) if kept else 0)
            if admitted and tokens + new > PREFILL_TOKENS:
                break
            self.waiting.popleft()
            pending.kept = kept
            try:
                seen = len(kept.images) if kept else 0
                pending.patches = [self.pixels(image) for image in request.images[seen:]]
            except Exception as e:  # an image that can't be decoded is its request's error, nobody else's
                if pending.future.set_running_or_notify_cancel():
                    pending.future.set_exception(e)
                continue
            admitted.append(pending)
            tokens += new
            busy += n
            room -= n * per_row
        if admitted:
            self.sessions.shrink(max(room, 0))
        return sorted(admitted, key=lambda pending: pending.kept is not None)

    def _kept(self, session: str, request: Request) -> Kept | None:
        return self.sessions.find(session, request, self.image_token_id)

    def _room(self) -> int:
        """Bytes for more rows and for sessions."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = psutil.virtual_memory().available
        return int((free + self.sessions.bytes) * self.memory_share)

    def _begin(self, admitted: list[Pending]) -> None:
        """Prefill these requests, and draw their first tokens."""
        self._drop_finished()
        first = len(self.rows)
        for pending in admitted:  # from here on a failure reaches their futures
            n = pending.request.sampling.max_new_tokens
            self.rows += [Row(pending, i, uniforms(seed, n).tolist()) for i, seed in enumerate(pending.request.seeds)]
        requests, kept = [p.request for p in admitted], [p.kept for p in admitted]
        patches = [array for pending in admitted for array in pending.patches]
        routing = self._routing()
        with span("prefill"):
            image_token = self.image_token_id, self.merge_size
            hidden, positions, computed = prefill(
                self.model, self.family, requests, kept, patches, *image_token, self.device, routing
            )
        if routing is not None:
            new = np.split(self._taken(routing), np.cumsum(computed.lengths)[:-1])
            for pending, own in zip(admitted, new, strict=True):
                old = pending.kept.routes if pending.kept else None
                pending.routes = own if old is None else np.concatenate([old, own])
        self.prefilled_tokens += sum(computed.lengths)
        samples = [len(request.seeds) for request in requests]
        self.cache.append(computed.tokens, computed.sequences(), samples, computed.states)
        for pending in admitted:
            pending.kept = None
        counts = torch.tensor(samples, device=self.device)
        self.next_positions = torch.cat([self.next_positions, positions.repeat_interleave(counts)])
        self.last_ids = torch.cat([self.last_ids, self.last_ids.new_zeros(len(self.rows) - first)])
        self.sampler = self._sampler_of(self.rows)
        logits = self._logits(hidden).repeat_interleave(counts, dim=0)
        self._draw(first, logits, self._sampler_of(self.rows[first:]))

    def _decode(self) -> None:
        """One token for every row."""
        embeds = self.text_model.get_input_embeddings()(self.last_ids).unsqueeze(1)
        self.cache.begin_step()
        positions = self.next_positions.view(1, -1, 1).expand(4, -1, 1)
        routing = self._routing()
        more: dict[str, Any] = {} if routing is None else {"routing": routing}
        hidden = self.family.text_forward(self.text_model, embeds, positions, None, (), context=self.cache, **more)[
            :, 0
        ]
        if routing is not None:
            for row, own in zip(self.rows, self._taken(routing), strict=True):
                if not row.over:
                    row.routes.append(own)
        self.next_positions = self.next_positions + 1
        assert self.sampler is not None
        self._draw(0, self._logits(hidden), self.sampler)
        if sum(row.over for row in self.rows) >= DROP_SHARE * len(self.rows):
            self._drop_finished()

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

    def _draw(self, first: int, logits: torch.Tensor, sampler: Sampler) -> None:
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
            row.versions.append(self.version)
            sampling = row.pending.request.sampling
            if token in sampling.stop_ids or len(row.ids) >= sampling.max_new_tokens:
                finished.append(i)
        if kept := [i for i in finished if self.rows[i].pending.keeps and self.rows[i].pending.request.sessions]:
            self._keep(kept)
        for i in finished:
            self.rows[i].finish()

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep all that was computed for these rows in their sessions."""
        groups = self.cache.group[torch.tensor(rows, dtype=torch.int64, device=self.device)].tolist()
        for i, group in zip(rows, groups, strict=True):
            row, pending = self.rows[i], self.rows[i].pending
            name = pending.request.sessions[row.number]
            before = self._kept(name, pending.request) or pending.kept
            if before is None:  # the prompt, kept once for all samples
                shared = (self.cache.cut(i, group, 0, 0),)
                before = pending.kept = Kept.of(pending.request, [], shared, routes=pending.routes)
            part = self.cache.cut(i, group, len(before.ids), len(row.ids) - 1)
            parts = *before.parts, part
            state, routes = self.cache.state(i), row.all_routes(0)
            self.sessions.put(name, Kept.of(pending.request, row.ids[:-1], parts, state, routes))
        self.sessions.shrink(self._room())

    def _drop_finished(self) -> None:
        alive = [i for i, row in enumerate(self.rows) if not row.over]
        if len(alive) < len(self.rows):
            keep = torch.tensor(alive, dtype=torch.int64, device=self.device)
            self.cache.keep(keep)
            self.rows = [self.rows[i] for i in alive]
            self.next_positions = self.next_positions[keep]
            self.last_ids = self.last_ids[keep]
            self.sampler = self._sampler_of(self.rows)
