"""Gathers the first requests of a group's agents, so that equal ones share a prefill. No HTTP."""

import asyncio
from dataclasses import replace

import numpy as np

from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.loop_bridge import cancel_all
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import Completion, Request


class FirstCalls:
    """The first requests of a group's agents.

    They are submitted together once every agent that holds a permit has made its first call or has
    ended; some agents are slow, so not later than `patience_s` after the first one, or as long
    after it as that took. Agents that still wait for a permit are not waited for.
    """

    def __init__(self, client: GenerationClient, patience_s: float = 0.0) -> None:
        self._client, self._patience_s = client, patience_s
        self._loop = asyncio.get_running_loop()
        self._start_time: float | None = None
        #: Places of the agents that have begun and may still make a first call.
        self._expected: set[int] = set()
        self._is_gathering = True
        #: (place in the group, state, set when it is submitted)
        self._waiting: list[tuple[int, RolloutState, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._completions: list[asyncio.Future[Completion]] = []

    def expect(self, place: int) -> None:
        """Note that an agent has begun; the first one starts the clock."""
        if self._start_time is None:
            self._start_time = self._loop.time()
        self._expected.add(place)

    async def submit(self, place: int, state: RolloutState) -> None:
        """Submit the request of `state`, perhaps shared; sets its completion and sample index.

        Args:
            place: the agent's place in the group, which orders the batch.

        Raises:
            EngineDied.
        """
        submitted: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((place, state, submitted))
        self._expected.discard(place)
        # Who comes after the others were submitted is not waited for, and waits for nobody.
        if not self._expected or not self._is_gathering:
            self._flush()
        elif self._timer is None:
            elapsed_s = self._loop.time() - (self._start_time or self._loop.time())
            self._timer = self._loop.call_later(max(self._patience_s, elapsed_s), self._flush)
        await submitted

    def withdraw(self, place: int) -> None:
        """Note that an agent has ended, or that its first call was refused."""
        self._expected.discard(place)
        if self._waiting and not self._expected:
            self._flush()

    async def close(self) -> None:
        """Cancel the requests, which agents that have ended may still share."""
        if self._timer is not None:
            self._timer.cancel()
        await cancel_all(self._completions)

    def _flush(self) -> None:
        """Submit what waits, in one batch; equal requests as one."""
        if self._timer is not None:
            self._timer.cancel()
        # From now on a first call is submitted at once.
        self._is_gathering = False
        # Without those whose agent has ended meanwhile.
        waiting = [entry for entry in self._waiting if not entry[2].done()]
        waiting.sort(key=lambda entry: entry[0])
        self._waiting = []
        shared: list[list[tuple[RolloutState, asyncio.Future[None]]]] = []
        for _, state, submitted in waiting:
            for sharers in shared:
                if _is_same(_request_of(sharers[0][0]), _request_of(state)):
                    sharers.append((state, submitted))
                    break
            else:
                shared.append([(state, submitted)])
        requests = []
        for sharers in shared:
            parts = [_request_of(state) for state, _ in sharers]
            seeds = tuple(seed for request in parts for seed in request.seeds)
            sessions = tuple(name for request in parts for name in request.sessions)
            requests.append(replace(parts[0], seeds=seeds, sessions=sessions))
        try:
            completions = self._client.submit(requests)
        except Exception as error:
            for _, _, submitted in waiting:
                if not submitted.done():
                    submitted.set_exception(error)
            return
        self._completions += completions
        for sharers, request, completion in zip(shared, requests, completions, strict=True):
            for index, (state, submitted) in enumerate(sharers):
                # Shielded from one agent's end, because others wait for the same answer.
                state.request, state.sample_index = request, index
                state.completion = asyncio.shield(completion)
                if not submitted.done():
                    submitted.set_result(None)


def _request_of(state: RolloutState) -> Request:
    assert state.request is not None
    return state.request


def _is_same(request: Request, second: Request) -> bool:
    """Return whether two requests ask for samples of the same prompt."""
    return (
        np.array_equal(request.ids, second.ids)
        and request.sampling == second.sampling
        and [image.hash for image in request.images] == [image.hash for image in second.images]
    )
