"""The embedded engine: continuous batching on the transformers model itself, for machines without SGLang.

One thread runs the model. Waiting requests are admitted whenever rows are free (prompts prefilled together as one packed
row, each once), every step decodes one token of every row, finished rows are dropped and their rows given to what waits. What
was computed for a session (`Request.sessions`) is kept for its next request, as long as there is room.

Weights are loaded between two steps. Running rows keep their tokens, each with its version; their keys, values and states are
computed again by the new weights, and those of sessions dropped, or both kept (`rollout.kv_after_update`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import psutil
import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied
from rlinf_vl.engines.torch.batch import PREFILL_TOKENS, Batch
from rlinf_vl.engines.torch.rows import Pending
from rlinf_vl.engines.torch.sessions import Sessions
from rlinf_vl.models.families import Family
from rlinf_vl.models.loading import part_of
from rlinf_vl.transport import broadcast
from rlinf_vl.transport.broadcast import WeightGroup
from rlinf_vl.transport.buckets import Label, fingerprint
from rlinf_vl.transport.delta import Patch
from rlinf_vl.types import Completion, ImageRef, Request

log = logging.getLogger(__name__)


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
        keep_kv: bool = False,
    ) -> None:
        """`banned`: bool [V], never sampled. `max_running`: most rows at once, further bounded so that a worst-case row
        of each fits in `memory_share` of the memory that is free or used for sessions; sessions use what is left of that.
        `report_routes`: samples have routes, if the model has mixtures. `keep_kv`: `rollout.kv_after_update` is keep."""
        model.to(device)  # pyright: ignore[reportArgumentType]  # its decorator hides self
        self.model = model.eval().requires_grad_(False)
        self.pixels = pixels
        self.max_running = max_running
        self.memory_share = memory_share
        self.keep_kv = keep_kv
        self.device = torch.device(device)
        self.version = 0
        self.asleep: set[str] = set()  # tags of the memory that is released
        self.sessions = Sessions()
        self.waiting: deque[Pending] = deque()
        self.batch = Batch(
            model,
            family,
            torch.from_numpy(banned).to(device),
            image_token_id,
            merge_size,
            self.device,
            self.sessions,
            self._room,
            family.mixture(model.config) if report_routes else None,
        )
        self._wake = threading.Condition()
        self._step_lock = threading.Lock()
        self._waiting_for_it = 0  # other threads than the engine's
        self._torn = False  # an update has not brought all of its weights
        self._stale = False  # rows have keys and values of former weights
        self._paused = False
        self._closed = False
        self._weight_group: ProcessGroup | None = None
        self._stepping = False  # the engine's thread is making a step
        self._progress = time.monotonic()  # when it last got on with a step, or had none to make
        # One step may take minutes on a CPU. A layer doesn't, so each layer that begins is progress.
        for modules in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
            for layer in modules:
                layer.register_forward_pre_hook(self._note_progress)
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # --- the protocol -------------------------------------------------------------------------------------------------

    @property
    def prefilled_tokens(self) -> int:
        return self.batch.prefilled_tokens

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        assert not self.asleep, f"asked to generate while its memory is released: {sorted(self.asleep)}"
        pending = [Pending(request) for request in requests]
        self.sessions.begin(name for request in requests for name in request.sessions)
        with self._wake:
            if self._closed:
                raise EngineDied("the engine is closed")
            self._expect_step()
            self.waiting.extend(pending)
            self._wake.notify()
        return [p.future for p in pending]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [future.result() for future in self.submit(requests)]

    def end_sessions(self, names: Sequence[str]) -> None:
        self.sessions.end(names)

    def load_weights(self, buckets: Iterable[Mapping[str, torch.Tensor | Patch]], version: int) -> None:
        assert "weights" not in self.asleep, "asked to load weights while their memory is released"
        with self._between_steps(), torch.no_grad():
            self._torn = True
            weights = dict(self.model.named_parameters())
            for bucket in buckets:
                for name, value in bucket.items():
                    if name not in weights or weights[name].shape != value.shape:
                        held = tuple(weights[name].shape) if name in weights else "no such weight"
                        raise ValueError(f"weight {name!r} {tuple(value.shape)} does not fit the engine's ({held})")
                    if isinstance(value, Patch):
                        value.apply(weights[name])
                    else:
                        weights[name].copy_(value)
                    if part_of(name, self.batch.family) != "language_model":
                        self.batch.images.clear()
            self._torn = False
            self.version = version
            if not self.keep_kv:
                self.sessions.clear()
                for row in self.batch.rows:
                    row.pending.kept = None
                self._stale = True

    def join_weight_group(self, group: WeightGroup) -> None:
        if self._weight_group is not None:
            broadcast.leave(self._weight_group)
        self._weight_group = broadcast.join(group)

    def load_broadcast(self, labels: Sequence[Label], version: int) -> None:
        assert self._weight_group is not None, "no weight group was joined"
        self.load_weights(broadcast.receive(self._weight_group, labels, self.device), version)

    def fingerprint(self, names: Sequence[str]) -> int:
        weights = dict(self.model.named_parameters())
        with self._between_steps():
            return fingerprint(weights[name] for name in names)

    def pause(self) -> None:
        with self._wake:
            self._paused = True
        with self._between_steps():  # the one under way has ended
            pass

    def resume(self) -> None:
        with self._wake:
            self._expect_step()
            self._paused = False
            self._wake.notify()

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """As `Engine.release_memory`. On the CPU the weights stay where they are."""
        with self._between_steps():
            self.batch.leave_cancelled()
            wanted = [p for p in self.waiting if not p.future.cancelled()]
            assert all(row.over for row in self.batch.rows) and not wanted, "memory is released between rollouts only"
            if "kv_cache" in tags:
                self.batch.clear()
                self.sessions.clear()
            if "weights" in tags and self.device.type == "cuda":
                self.model.to("cpu")  # pyright: ignore[reportArgumentType]  # its decorator hides self
            self.asleep |= set(tags)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        with self._between_steps():
            if self.asleep & set(tags) & {"weights"}:
                self.model.to(self.device)  # pyright: ignore[reportArgumentType]  # its decorator hides self
            self.asleep -= set(tags)

    def alive(self, timeout_s: float = 30.0) -> bool:
        """As `Engine.alive`. An engine that has a step to make, and begins no layer of it within `timeout_s`, is wedged."""
        if not self._thread.is_alive() or self._closed:
            return False
        idle_s = time.monotonic() - self._progress
        wedged = idle_s > timeout_s and (self._stepping or self._may_step())
        if wedged:
            log.warning("the torch engine has made no progress for %.0f s, though it has requests", idle_s)
        return not wedged

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        if self._weight_group is not None:
            broadcast.leave(self._weight_group)
            self._weight_group = None

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """The engine's thread makes no step meanwhile, nor before: a lock that it takes again at once is hardly ever another's."""
        with self._wake:
            self._waiting_for_it += 1
        try:
            with self._step_lock:
                yield
        finally:
            with self._wake:
                self._expect_step()
                self._waiting_for_it -= 1
                self._wake.notify()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = EngineDied("the engine was closed")
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._may_step())
                    if self._closed:
                        break
                with self._step_lock, torch.inference_mode():
                    if not self._may_step():  # any more
                        continue
                    self._note_progress()
                    self._stepping = True
                    self.batch.leave_cancelled()
                    if self._stale:
                        self._stale = False
                        self.batch.recompute(self.pixels)
                    while admitted := self._next_requests():
                        self.batch.begin(admitted, self.version)
                    if self.batch.rows:
                        self.batch.decode(self.version)
                    self._note_progress()
                    self._stepping = False
        except BaseException as e:
            error = e
            log.exception("the torch engine failed")
        with self._wake:
            self._closed = True
            futures = {p.future for p in (*self.waiting, *(row.pending for row in self.batch.rows))}
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _note_progress(self, *_: object) -> None:
        self._progress = time.monotonic()

    def _expect_step(self) -> None:
        """Count from now on the time without progress, unless a step is due or being made already."""
        if not self._stepping and not self._may_step():
            self._note_progress()

    def _may_step(self) -> bool:
        if self._paused or self._torn or self._waiting_for_it:
            return False
        return bool(self.batch.rows or self.waiting)

    def _next_requests(self) -> list[Pending]:
        """Take as many waiting requests as there is room for and as are prefilled at once; one at least if nothing runs."""
        busy, tokens = sum(not row.over for row in self.batch.rows), 0
        admitted: list[Pending] = []
        room = self._room() if self.waiting else 0
        while self.waiting:
            self._note_progress()  # its images may be decoded here
            pending = self.waiting[0]
            if pending.future.cancelled():
                self.waiting.popleft()
                continue
            request = pending.request
            state, longest = self.batch.decode_state, request.sampling.max_new_tokens + len(request.ids)
            per_row = state.token_bytes(self.model.dtype) * longest + state.row_bytes()
            n = len(request.seeds)
            if (busy + n > self.max_running or n * per_row > room) and (admitted or busy):
                break
            kept = self.batch.kept(request.sessions[0], request) if n == 1 == len(request.sessions) else None
            new = len(request.ids) - (len(kept.ids) if kept else 0)
            if admitted and tokens + new > PREFILL_TOKENS:
                break
            self.waiting.popleft()
            pending.kept = kept
            try:
                seen = len(kept.images) if kept else 0
                pending.patches = self.batch.patches(request.images[seen:], self.pixels)
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

    def _room(self) -> int:
        """Bytes for more rows and for sessions."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = psutil.virtual_memory().available
        return int((free + self.sessions.bytes) * self.memory_share)
