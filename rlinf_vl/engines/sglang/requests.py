"""What the engine is asked, as coroutines on SGLang's loop: sent when there is room, given back before an update, and asked again.

A request holds its pixels until it is answered or given up. Before an update SGLang gives back what it is drawing, and after it is
asked for the rest, the longest first: the tokens so far are part of the prompt, and images have the identity that the new tower
gives them. SGLang's own way (its pause mode "retract") computes tokens again, but finds the old embeddings of images, and labels
one token too many as new where its steps overlap.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import asyncio
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
from rlinf_vl.models.families import Mixture
from rlinf_vl.types import Completion, ImageRef, Request, Sample

#: Samples handed to the scheduler at once, as a multiple of `max_running`: it never starves, and memory stays bounded.
QUEUE_FACTOR = 2
#: Seconds after which SGLang is told again to give back what it is drawing.
PARK_S = 0.05


class Requests:
    """The requests that are not answered yet. What is not a coroutine may be called from any thread.

    Attributes:
        host: SGLang, once it has started.
        paused: SGLang is asked for nothing.
        in_flight: samples that SGLang has, or will be asked for again.
        updates: how often weights have come; each has a prefix cache of its own, and with `keep_kv` episodes stay with theirs.
        towers: how often weights of the vision tower have come.
        begun: with `keep_kv`, `updates` when the first request of each session came that has not ended.
    """

    host: Host

    def __init__(
        self,
        settings: Settings,
        pixels: Callable[[ImageRef], np.ndarray],
        banned: np.ndarray,
        image_token_id: int,
        merge_size: int,
        mixture: Mixture | None,
        timeout_s: float | None,
    ) -> None:
        """As `SglangEngine`; `mixture`: samples have its routes."""
        self.settings = settings
        self.pixels = PixelFiles(pixels)
        self.bans = dict.fromkeys(map(str, np.flatnonzero(banned).tolist()), messages.BAN)
        self.image_token_id = image_token_id
        self.merge_size = merge_size
        self.mixture = mixture
        self.timeout_s = timeout_s
        self.paused = False
        self.in_flight = 0
        self.updates = 0
        self.towers = 0
        self.asking = 0  # messages that SGLang has not answered
        self._parks = 0  # how often it was to give back what it is drawing
        self.begun: dict[str, int] = {}
        #: What waits for the end of a pause: with the tokens that it has drawn.
        self._parked: list[tuple[int, asyncio.Future[None]]] = []
        self._answered = asyncio.Event()
        self._room = asyncio.Condition()
        self._preparing = ThreadPoolExecutor(1, "sglang-pixels")

    def close(self) -> None:
        """SGLang has ended."""
        self._preparing.shutdown(wait=False)
        self.pixels.close()

    async def complete(self, request: Request) -> Completion:
        """Raises ValueError for a request that doesn't fit, TimeoutError, and what `pixels` raises."""
        n, prompt, new = len(request.seeds), len(request.ids), request.sampling.max_new_tokens
        if prompt + new > self.settings.context_length:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_new_tokens {new} do not fit the engine's context of"
                f" {self.settings.context_length} tokens (runner.seq_length)"
            )
        runs = messages.placeholder_runs(request, self.image_token_id, self.merge_size)
        async with self._room:
            most = QUEUE_FACTOR * self.settings.max_running
            await self._room.wait_for(lambda: not self.paused and (not self.in_flight or self.in_flight + n <= most))
            self.in_flight += n
        try:
            holding = self._preparing.submit(self.pixels.hold, request.images)
            try:
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
                f"rollout request not answered within {self.timeout_s} s and aborted: a prompt of {prompt}"
                f" tokens with {len(request.images)} images, {n} samples of at most {new} tokens"
            ) from None
        finally:
            self.in_flight -= n
            await self._tell_waiting()

    def end_sessions(self, names: Sequence[str]) -> None:
        for name in names:
            self.begun.pop(name, None)

    async def park(self) -> None:
        """Have SGLang give back all that it is drawing. It must not be held, and is asked for no more while `paused`."""
        self._parks += 1
        while self.asking:  # a message may be on its way only now
            self._answered.clear()
            self.host.manager.abort_request(abort_all=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), PARK_S)

    async def resume(self) -> None:
        """The pause is over: what was given back goes on, the longest first; then what has not begun."""
        self.paused = False
        parked, self._parked = self._parked, []
        for _, turn in sorted(parked, key=lambda waiting: -waiting[0]):
            if not turn.done():
                turn.set_result(None)
        await self._tell_waiting()

    def _cache_of(self, request: Request) -> int:
        """Which update's prefix cache is this request's."""
        if not self.settings.keep_kv:
            return self.updates
        return min((self.begun.setdefault(name, self.updates) for name in request.sessions), default=self.updates)

    async def _tell_waiting(self) -> None:
        async with self._room:
            self._room.notify_all()

    async def _release_once_read(self, holding: Future[Any], request: Request) -> None:
        """Release the images of a request that was given up, if it got as far as to hold them: the scheduler reads messages in
        order, so once it has answered one sent now, it has read all that name them."""
        await asyncio.wrap_future(holding)
        await self.host.manager.get_internal_state()
        self.pixels.release(request.images)

    async def _sample(
        self, request: Request, runs: Sequence[tuple[int, int]], patches: Sequence[MappedPatches]
    ) -> Completion:
        """All samples of one request. Those that an update interrupts go on behind the tokens that they have."""
        nothing = Sample(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
        samples = [nothing] * len(request.seeds)
        while unfinished := [i for i, sample in enumerate(samples) if sample.finish_reason == "abort"]:
            begun = [(samples[i], request.seeds[i]) for i in unfinished]
            further = await self._draw(request, begun, partial(self._ask, request, runs, patches))
            for i, (before, _), more in zip(unfinished, begun, further, strict=True):
                samples[i] = messages.joined(before, more, request.sampling)
        return Completion(tuple(samples))

    async def _draw(
        self, request: Request, begun: Sequence[tuple[Sample, int]], ask: Callable[..., Any]
    ) -> list[Sample]:
        """What SGLang draws behind these samples, with their seeds. Those that have no tokens are asked for as one group, whose
        prompt it computes once. Others are asked for one by one when their prompt is computed; in deterministic mode all are,
        because a group has one seed, with which all of its samples are the same."""
        sampling = messages.parameters(request.sampling, self.bans)
        goes_on = any(len(sample.ids) for sample, _ in begun)
        nothing = begun[0][0].ids[:0]
        if not goes_on and not self.settings.deterministic:
            return await ask(nothing, sampling | {"n": len(begun)})
        if goes_on and len(begun) > 1:
            await ask(nothing, sampling | {"max_new_tokens": 1})  # for its prompt alone
        asks = []
        for sample, seed in begun:
            own = {"max_new_tokens": request.sampling.max_new_tokens - len(sample.ids)}
            if self.settings.deterministic:
                own["sampling_seed"] = seed % 2**31
            asks.append(ask(sample.ids, sampling | own))
        return [sample for answer in await asyncio.gather(*asks) for sample in answer]

    async def _ask(
        self,
        request: Request,
        runs: Sequence[tuple[int, int]],
        patches: Sequence[MappedPatches],
        begun: np.ndarray,
        sampling: dict[str, Any],
    ) -> list[Sample]:
        """What SGLang draws behind the prompt and these ids; with "abort" for a reason where it has given back what it had."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        while self.paused:
            turn = self.host.loop.create_future()
            self._parked.append((len(begun), turn))
            await turn
        # From here to the message nothing else runs on the loop, so that it is counted before anything is parked.
        ids, parks = np.concatenate([request.ids, begun]), self._parks
        images = messages.sent_images(request, runs, patches, self.towers)
        asked = GenerateReqInput(
            input_ids=ids.tolist(),
            # One entry: SGLang takes several for a batch where n > 1.
            image_data=[{"images": images}] if images else None,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=-1,
            extra_key=f"update {self._cache_of(request)}",
            return_routed_experts=self.mixture is not None,
        )
        self.asking += 1
        try:
            (answer,) = [part async for part in self.host.manager.generate_request(asked, None)]
        finally:
            self.asking -= 1
            if not self.asking:
                self._answered.set()
        outputs = answer if isinstance(answer, list) else [answer]
        assert len(outputs) == sampling.get("n", 1), (len(outputs), sampling)
        told = request.sampling.stop_ids, len(ids), self.mixture, parks != self._parks
        return [messages.as_sample(output, *told) for output in outputs]
