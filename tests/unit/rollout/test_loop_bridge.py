"""What threads have for an event loop: everything arrives, in order, in the loop's thread, and wakes it seldom."""

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from rlinf_vl.rollout.episode.loop_bridge import LoopBridge, asyncio_future, loop_bridge, wait_done


def test_what_threads_put_is_called_in_the_loop_in_order_and_wakes_it_once():
    async def main() -> tuple[list[tuple[int, int]], set[int], int]:
        loop, here = asyncio.get_running_loop(), loop_bridge()
        assert loop_bridge() is here
        called: list[tuple[int, int]] = []
        threads_of: set[int] = set()
        wakes, call_soon = 0, loop.call_soon_threadsafe

        def count(function, *arguments):
            nonlocal wakes
            wakes += 1
            return call_soon(function, *arguments)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]

        def work(number: int) -> None:
            for i in range(500):
                here.call_in_loop(
                    lambda i=i: (called.append((number, i)), threads_of.add(threading.get_ident()))
                )

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:  # the loop's thread does nothing meanwhile
            thread.join()
        while len(called) < 2000:
            await asyncio.sleep(0.001)
        return called, threads_of, wakes

    called, threads, wakes = asyncio.run(main())
    assert threads == {threading.get_ident()} and wakes == 1
    assert all([i for n, i in called if n == number] == list(range(500)) for number in range(4))


def test_an_awaitable_brings_results_errors_and_cancellation_both_ways():
    async def main() -> None:
        futures: list[Future] = [Future() for _ in range(4)]
        answers = list(map(asyncio_future, futures))
        futures[0].set_running_or_notify_cancel()
        threading.Timer(0.01, futures[0].set_result, ["said"]).start()
        assert await answers[0] == "said"
        futures[1].set_exception(KeyError("k"))
        with pytest.raises(KeyError):
            await answers[1]
        futures[2].cancel()
        futures[2].set_running_or_notify_cancel()
        with pytest.raises(asyncio.CancelledError):
            await answers[2]
        answers[3].cancel()
        await asyncio.sleep(0)
        assert futures[3].cancelled()
        assert await asyncio_future(futures[0]) == "said"  # done before it is asked for

    asyncio.run(main())


def test_done_waits_no_longer_than_it_is_told_and_leaves_the_future_alone():
    async def main() -> None:
        future: Future = Future()
        begin = time.monotonic()
        assert not await wait_done(future, 0.05) and time.monotonic() - begin >= 0.05
        waiting = asyncio.ensure_future(wait_done(future, 60))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not future.cancelled()
        threading.Timer(0.02, future.set_result, [1]).start()
        assert await wait_done(future, 60) and await wait_done(future, 0)

    asyncio.run(main())


def test_a_closed_loop_hears_nothing_and_is_freed():
    async def main() -> tuple[LoopBridge, weakref.ref]:
        return loop_bridge(), weakref.ref(asyncio.get_running_loop())

    here, loop = asyncio.run(main())
    here.call_in_loop(lambda: pytest.fail("nobody calls it"))
    gc.collect()
    assert loop() is None
    here.call_in_loop(lambda: pytest.fail("nobody calls it"))
