"""Requests as coroutines on SGLang's loop: sent when there is room, aborted before an update, and
continued after it.

A request holds its pixels until it is answered or given up. Before an update SGLang returns its
unfinished samples, and after the update they are continued, the longest first: the tokens so far
    are part
of the prompt, and images have an identity for the new vision tower. SGLang's own pause mode
"retract" computes tokens again, too, but it reuses old embeddings of images, and where its steps
overlap it labels one old token too many as new.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from rlinf_vl.engines.sglang import messages
from rlinf_vl.engines.sglang.pixels import MappedPatches, PixelFiles
from rlinf_vl.engines.sglang.process import Host
from rlinf_vl.engines.sglang.settings import Settings
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.types import Completion, ImageRef, Request, Sample

#: Samples handed to the scheduler at once, as a multiple of `max_running`: it never starves, and
#: memory stays bounded.
QUEUE_FACTOR = 2
#: Seconds after which SGLang is asked again to return its unfinished samples.
PARK_S = 0.05


class Requests:
    """The requests that are not answered yet. Methods that are no coroutines may be called from any
    thread.

    Attributes:
        host: SGLang, once it has started.
        paused: no messages are sent to SGLang.
        in_flight: samples that SGLang has or will be asked for again.
        updates: number of weight updates. Each has a prefix cache of its own; with `keep_kv` a
            session keeps the prefix cache of its first request.
        towers: number of weight updates that changed the vision tower.
        session_updates: with `keep_kv`, the open sessions, each with `updates` at its first message
            to SGLang; None before it.
    """

    host: Host

    def __init__(
        self,
        settings: Settings,
        pixels: Callable[[ImageRef], np.ndarray],
        image_tokens: ImageTokens,
        positions: Callable[[np.ndarray, np.ndarray, ImageTokens], np.ndarray],
        mixture: Mixture | None,
        timeout_s: float | None,
    ) -> None:
        """Take the arguments of `SglangEngine`, and `Family.positions`.

        `mixture`: given if samples have the column `ROUTES`.
        """
        self.settings = settings
        self.pixels = PixelFiles(pixels)
        self.image_tokens = image_tokens
        self.positions = positions
        self.mixture = mixture
        self.timeout_s = timeout_s
        self.paused = False
        self.in_flight = 0
        self.updates = 0
        self.towers = 0
        self.unanswered_messages = 0
        self._parks = 0  # number of calls of `park`
        self.session_updates: dict[str, int | None] = {}
        self._sessions_lock = threading.Lock()
        # Samples that wait for the end of a pause: tokens drawn so far, and a future to wake each.
        self._parked: list[tuple[int, asyncio.Future[None]]] = []
        self._answered = asyncio.Event()
        self._room = asyncio.Condition()
        self._preparing = ThreadPoolExecutor(settings.pixel_threads, "sglang-pixels")

    def close(self) -> None:
        """Release the pixels, after SGLang has ended."""
        self._preparing.shutdown(wait=False)
        self.pixels.close()

    async def complete(self, request: Request) -> Completion:
        """Answer a request.

        Raises:
            ValueError: the request does not fit the context, or its placeholders do not fit its
                images.
            TimeoutError: it was not answered in time. Errors of `pixels` pass, too.
        """
        n, prompt, new = len(request.seeds), len(request.ids), request.sampling.max_new_tokens
        if prompt + new > self.settings.context_length:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_new_tokens {new} do not fit the engine's "
                f"context of {self.settings.context_length} tokens (runner.seq_length)"
            )
        runs = messages.placeholder_runs(request, self.image_tokens)
        async with self._room:
            limit = QUEUE_FACTOR * self.settings.max_running
            # A request above the limit is sent alone.
            await self._room.wait_for(
                lambda: not self.paused and (not self.in_flight or self.in_flight + n <= limit)
            )
            self.in_flight += n
        try:
            holding = self._preparing.submit(self.pixels.hold, request.images)
            try:
                # Shielded, so that a cancelled request still learns which images it holds.
                patches = await asyncio.shield(asyncio.wrap_future(holding))
                async with asyncio.timeout(self.timeout_s):
                    completion = await self._sample(request, runs, patches)
            except BaseException:
                if not self.host.end:
                    self.host.run(self._release_once_read, holding, request)
                raise
            self.pixels.release(request.images)
            return completion
        except TimeoutError:  # leaving its coroutine has aborted it in SGLang
            raise TimeoutError(
                f"rollout request not answered within {self.timeout_s} s and aborted: a prompt of "
                f"{prompt} tokens with {len(request.images)} images, {n} samples of at most {new} "
                "tokens"
            ) from None
        finally:
            self.in_flight -= n
            await self._notify_waiting()

    def open_sessions(self, names: Sequence[str]) -> None:
        """Note the sessions of a request that is submitted."""
        if self.settings.keep_kv:
            with self._sessions_lock:
                for name in names:
                    self.session_updates.setdefault(name, None)

    def end_sessions(self, names: Sequence[str]) -> None:
        """Forget which prefix caches these sessions use."""
        with self._sessions_lock:
            for name in names:
                self.session_updates.pop(name, None)

    async def park(self) -> None:
        """Make SGLang return all unfinished samples. `paused` must be set, but SGLang must not be
        paused."""
        self._parks += 1
        # again and again, because a message may reach SGLang after the abort
        while self.unanswered_messages:
            self._answered.clear()
            self.host.manager.abort_request(abort_all=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), PARK_S)

    async def resume(self) -> None:
        """End the pause: continue the interrupted samples, the longest first, then admit new
        requests."""
        self.paused = False
        parked, self._parked = self._parked, []
        for _, wake_up in sorted(parked, key=lambda waiting: -waiting[0]):
            if not wake_up.done():
                wake_up.set_result(None)
        await self._notify_waiting()

    def _positions(self, request: Request, ids: np.ndarray) -> np.ndarray:
        """Return the trainer's positions of a request's ids and those sampled behind them, [3, T]."""
        image_tokens = self.image_tokens.with_times(request.images)
        return self.positions(ids.astype(np.int64), request.image_grids, image_tokens)[1:]

    def _prefix_cache_of(self, request: Request) -> int:
        """Return the update whose prefix cache the request uses."""
        first_updates = []
        with self._sessions_lock:
            for name in request.sessions:
                # One may have ended while its request waited: others of its group share it.
                if name in self.session_updates:
                    first_update = self.session_updates[name]
                    if first_update is None:
                        first_update = self.session_updates[name] = self.updates
                    first_updates.append(first_update)
        return min(first_updates, default=self.updates)

    async def _notify_waiting(self) -> None:
        async with self._room:
            self._room.notify_all()

    async def _release_once_read(self, holding: Future[Any], request: Request) -> None:
        """Release the images of a request that was given up, if it holds any.

        The scheduler reads messages in order: once it has answered a message sent now, it has read
            all
        messages that refer to the images.
        """
        await asyncio.wrap_future(holding)
        await self.host.manager.get_internal_state()
        self.pixels.release(request.images)

    async def _sample(
        self, request: Request, runs: Sequence[messages.Runs], patches: Sequence[MappedPatches]
    ) -> Completion:
        """Draw all samples of a request. Those that an update interrupts are continued after it."""
        not_begun = Sample(
            np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort"
        )
        samples = [not_begun] * len(request.seeds)
        while unfinished := [
            i for i, sample in enumerate(samples) if sample.finish_reason == "abort"
        ]:
            samples_and_seeds = [(samples[i], request.seeds[i]) for i in unfinished]
            generate = partial(self._generate, request, runs, patches)
            continuations = await self._draw(request, samples_and_seeds, generate)
            for i, continuation in zip(unfinished, continuations, strict=True):
                samples[i] = messages.joined(samples[i], continuation, request.sampling)
        return Completion(tuple(samples))

    async def _draw(
        self,
        request: Request,
        samples_and_seeds: Sequence[tuple[Sample, int]],
        generate: Callable[..., Any],
    ) -> list[Sample]:
        """Draw the continuations of these samples, each with its seed.

        Samples without tokens are one message to SGLang, which computes their prompt once. Others
        are one message each, sent when their common prompt is in the prefix cache. In deterministic
        mode each sample is a message, because SGLang has one seed a message, with which all samples
        are the same.
        """
        sampling = messages.parameters(request.sampling)
        continued = any(len(sample.ids) for sample, _ in samples_and_seeds)
        no_ids = np.zeros(0, np.int32)
        if not continued and not self.settings.deterministic:
            return await generate(no_ids, sampling | {"n": len(samples_and_seeds)})
        if continued and len(samples_and_seeds) > 1:
            # brings the prompt into the prefix cache
            await generate(no_ids, sampling | {"max_new_tokens": 1})
        pending_answers = []
        for sample, seed in samples_and_seeds:
            changes = {"max_new_tokens": request.sampling.max_new_tokens - len(sample.ids)}
            if self.settings.deterministic:
                changes["sampling_seed"] = seed % 2**31
            pending_answers.append(generate(sample.ids, sampling | changes))
        answers = await asyncio.gather(*pending_answers)
        return [sample for answer in answers for sample in answer]

    async def _generate(
        self,
        request: Request,
        runs: Sequence[messages.Runs],
        patches: Sequence[MappedPatches],
        sampled: np.ndarray,
        sampling: dict[str, Any],
    ) -> list[Sample]:
        """Send one message: draw behind the prompt and the sampled ids. Samples that SGLang returns
        unfinished have "abort" for a reason."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        while self.paused:
            wake_up = self.host.loop.create_future()
            self._parked.append((len(sampled), wake_up))
            await wake_up
        # No await from here to the message, so `park` can't run before the message is counted.
        ids = np.concatenate([request.ids, sampled])
        parks_before = self._parks
        images = messages.sent_images(
            request, runs, patches, self.image_tokens.video_id, self.towers
        )
        message = GenerateReqInput(
            input_ids=ids.tolist(),
            # One entry, because SGLang takes several for a batch where n > 1.
            image_data=[{"images": images, "positions": self._positions(request, ids)}]
            if images
            else None,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=-1,
            extra_key=f"update {self._prefix_cache_of(request)}",
            return_routed_experts=self.mixture is not None,
        )
        self.unanswered_messages += 1
        try:
            (answer,) = [part async for part in self.host.manager.generate_request(message, None)]
        finally:
            self.unanswered_messages -= 1
            if not self.unanswered_messages:
                self._answered.set()
        outputs = answer if isinstance(answer, list) else [answer]
        assert len(outputs) == sampling.get("n", 1), (len(outputs), sampling)
        interrupted = parks_before != self._parks
        return [
            messages.as_sample(
                output, request.sampling.stop_ids, len(ids), self.mixture, interrupted
            )
            for output in outputs
        ]
