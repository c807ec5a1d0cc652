"""The embedded engine: continuous batching on the transformers model itself, for machines without
SGLang.

One thread runs the model. It admits waiting requests whenever rows are free and prefills their
prompts together, each once, as one packed row. Every step decodes one token for every row. Keys and
values of a session (`Request.sessions`) are cached for its next request, as long as there is
memory.

Weights are loaded between two steps. Running rows keep their tokens, each with its version. Their
keys, values and states are recomputed with the new weights, and those of sessions are dropped; or
both are kept (`rollout.kv_after_update`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied
from rlinf_vl.engines.torch.batch import PREFILL_TOKENS, Batch
from rlinf_vl.engines.torch.prefix_cache import PrefixCache
from rlinf_vl.engines.torch.rows import Pending
from rlinf_vl.models.family import Family
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.loading import part_of
from rlinf_vl.types import Completion, ImageRef, Request
from rlinf_vl.weights import process_group
from rlinf_vl.weights.buckets import Label, fingerprint
from rlinf_vl.weights.patch import Patch
from rlinf_vl.weights.process_group import WeightGroup

log = logging.getLogger(__name__)


class TorchEngine:
    """An `Engine` on a transformers model of `family` (see `load_model`). It owns the model and one
    thread."""

    reads_labels = False

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        *,
        banned: np.ndarray,
        pixels: Callable[[ImageRef], np.ndarray],
        image_tokens: ImageTokens,
        max_running: int,
        memory_share: float = 0.6,
        device: str = "cpu",
        report_routes: bool = False,
        keep_kv: bool = False,
    ) -> None:
        """Move the model to the device and start the thread.

        Args:
            banned: ids that are never sampled: bool [V].
            pixels: returns the patches of an image, float32 [P, d].
            max_running: most rows at once. Fewer run if their longest possible samples don't fit in
                memory.
            memory_share: share of the memory, free or used by sessions, for rows; sessions use the
                rest of it.
            report_routes: samples have the column `ROUTES`, if the model has mixtures of experts.
            keep_kv: `rollout.kv_after_update` is keep.
        """
        model.to(device)  # pyright: ignore[reportArgumentType]  # its decorator hides self
        self.model = model.eval().requires_grad_(False)
        self.pixels = pixels
        self.max_running = max_running
        self.memory_share = memory_share
        self.keep_kv = keep_kv
        self.device = torch.device(device)
        self.version = 0
        self.released_tags: set[str] = set()  # of `MEMORY_TAGS`
        self.sessions = PrefixCache()
        self.waiting: deque[Pending] = deque()
        self.batch = Batch(
            model,
            family,
            torch.from_numpy(banned).to(device),
            image_tokens,
            self.device,
            self.sessions,
            self._free_bytes,
            family.mixture(model.config) if report_routes else None,
        )
        self._wake = threading.Condition()
        self._step_lock = threading.Lock()
        # threads that wait for the step lock or hold it, the engine's own aside
        self._threads_waiting = 0
        self._update_incomplete = False  # weights of an update are missing: it runs, or has failed
        self._cache_outdated = False  # rows have keys and values computed with former weights
        self._paused = False
        self._closed = False
        self._weight_group: ProcessGroup | None = None
        self._stepping = False  # the engine's thread is inside a step
        # time of the last progress, or of the last moment without work
        self._progress = time.monotonic()
        # One step may take minutes on a CPU. A layer doesn't, so each layer that begins is
        # progress.
        for modules in [
            module for module in model.modules() if isinstance(module, torch.nn.ModuleList)
        ]:
            for layer in modules:
                layer.register_forward_pre_hook(self._note_progress)
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # --- the protocol -------------------------------------------------------------------------------------------------

    @property
    def prefilled_tokens(self) -> int:
        return self.batch.prefilled_tokens

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        assert not self.released_tags, (
            f"asked to generate while its memory is released: {sorted(self.released_tags)}"
        )
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

    def load_weights(
        self, buckets: Iterable[Mapping[str, torch.Tensor | Patch]], version: int
    ) -> None:
        assert "weights" not in self.released_tags, (
            "asked to load weights while their memory is released"
        )
        with self._between_steps(), torch.no_grad():
            self._update_incomplete = True
            weights = dict(self.model.named_parameters())
            for bucket in buckets:
                for name, value in bucket.items():
                    if name not in weights or weights[name].shape != value.shape:
                        engine_shape = (
                            tuple(weights[name].shape) if name in weights else "no such weight"
                        )
                        raise ValueError(
                            f"weight {name!r} {tuple(value.shape)} does not fit the engine's "
                            f"({engine_shape})"
                        )
                    if isinstance(value, Patch):
                        value.apply(weights[name])
                    else:
                        weights[name].copy_(value)
                    if part_of(name, self.batch.family) != "language_model":
                        self.batch.images.clear()
            self._update_incomplete = False
            self.version = version
            if not self.keep_kv:
                self.sessions.clear()
                for row in self.batch.rows:
                    row.pending.prefix = None
                self._cache_outdated = True

    def join_weight_group(self, group: WeightGroup) -> None:
        if self._weight_group is not None:
            process_group.leave(self._weight_group)
        self._weight_group = process_group.join(group)

    def load_broadcast(self, labels: Sequence[Label], version: int) -> None:
        assert self._weight_group is not None, "no weight group was joined"
        self.load_weights(process_group.receive(self._weight_group, labels, self.device), version)

    def load_labels(self, labels: Sequence[Any], version: int) -> None:
        raise NotImplementedError("this process has the engine's memory: load_weights")

    def fingerprint(self, names: Sequence[str]) -> int:
        weights = dict(self.model.named_parameters())
        with self._between_steps():
            return fingerprint(weights[name] for name in names)

    def pause(self) -> None:
        with self._wake:
            self._paused = True
        with self._between_steps():  # returns when the current step has ended
            pass

    def resume(self) -> None:
        with self._wake:
            self._expect_step()
            self._paused = False
            self._wake.notify()

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Release memory as `Engine.release_memory` says. On the CPU the weights stay where they
        are."""
        with self._between_steps():
            self.batch.finish_cancelled()
            waiting = [p for p in self.waiting if not p.future.cancelled()]
            assert all(row.done for row in self.batch.rows) and not waiting, (
                "memory is released between rollouts only"
            )
            if "kv_cache" in tags:
                self.batch.clear()
                self.sessions.clear()
            if "weights" in tags and self.device.type == "cuda":
                self.model.to("cpu")  # pyright: ignore[reportArgumentType]  # its decorator hides self
            self.released_tags |= set(tags)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        with self._between_steps():
            if self.released_tags & set(tags) & {"weights"}:
                self.model.to(self.device)  # pyright: ignore[reportArgumentType]  # its decorator hides self
            self.released_tags -= set(tags)

    def alive(self, timeout_s: float = 30.0) -> bool:
        """Return whether the engine can answer. One that has work, and begins no layer within
        `timeout_s`, can't."""
        if not self._thread.is_alive() or self._closed:
            return False
        idle_s = time.monotonic() - self._progress
        wedged = idle_s > timeout_s and (self._stepping or self._may_step())
        if wedged:
            log.warning(
                "the torch engine has made no progress for %.0f s, though it has requests", idle_s
            )
        return not wedged

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        if self._weight_group is not None:
            process_group.leave(self._weight_group)
            self._weight_group = None

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the engine's thread between two steps.

        The counter makes that thread wait: it would otherwise take the lock again at once after
            each
        step, and another thread would hardly ever get it.
        """
        with self._wake:
            self._threads_waiting += 1
        try:
            with self._step_lock:
                yield
        finally:
            with self._wake:
                self._expect_step()
                self._threads_waiting -= 1
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
                    # another thread may have changed this before the lock was free
                    if not self._may_step():
                        continue
                    self._note_progress()
                    self._stepping = True
                    self.batch.finish_cancelled()
                    if self._cache_outdated:
                        self._cache_outdated = False
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
            running = [row.pending for row in self.batch.rows]
            futures = {pending.future for pending in (*self.waiting, *running)}
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _note_progress(self, *_: object) -> None:
        self._progress = time.monotonic()

    def _expect_step(self) -> None:
        """Restart the clock of `alive`, unless a step is due or running already."""
        if not self._stepping and not self._may_step():
            self._note_progress()

    def _may_step(self) -> bool:
        if self._paused or self._update_incomplete or self._threads_waiting:
            return False
        return bool(self.batch.rows or self.waiting)

    def _next_requests(self) -> list[Pending]:
        """Take the next waiting requests, within memory, `max_running` and one prefill.

        At least one is taken if nothing runs, so that a request larger than the bounds is served,
        too.
        """
        running_rows = sum(not row.done for row in self.batch.rows)
        prefill_tokens = 0
        admitted: list[Pending] = []
        free_bytes = self._free_bytes() if self.waiting else 0
        while self.waiting:
            self._note_progress()  # decoding images, below, takes time
            pending = self.waiting[0]
            if pending.future.cancelled():
                self.waiting.popleft()
                continue
            request = pending.request
            state = self.batch.decode_state
            longest = len(request.ids) + request.sampling.max_new_tokens
            row_bytes = state.token_bytes(self.model.dtype) * longest + state.row_bytes()
            n = len(request.seeds)
            full = running_rows + n > self.max_running or n * row_bytes > free_bytes
            if full and (admitted or running_rows):
                break
            prefix = None
            if n == 1 and len(request.sessions) == 1:
                prefix = self.batch.cached_prefix(request.sessions[0], request)
            new_tokens = len(request.ids) - (len(prefix.ids) if prefix else 0)
            if admitted and prefill_tokens + new_tokens > PREFILL_TOKENS:
                break
            self.waiting.popleft()
            pending.prefix = prefix
            try:
                cached_images = len(prefix.images) if prefix else 0
                pending.patches = self.batch.patches(request.images[cached_images:], self.pixels)
            except (
                Exception
            ) as e:  # an image that can't be decoded is its request's error, nobody else's
                if pending.future.set_running_or_notify_cancel():
                    pending.future.set_exception(e)
                continue
            admitted.append(pending)
            prefill_tokens += new_tokens
            running_rows += n
            free_bytes -= n * row_bytes
        if admitted:
            self.sessions.shrink(max(free_bytes, 0))
        # the order that `prefill` needs
        return sorted(admitted, key=lambda pending: pending.prefix is not None)

    def _free_bytes(self) -> int:
        """Return the bytes available for further rows and for sessions, those of today's sessions
        included."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = psutil.virtual_memory().available
        return int((free + self.sessions.bytes) * self.memory_share)
