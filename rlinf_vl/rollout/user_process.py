"""A process for users' code, so that a crash or a call that never returns ends it and not the engine.

The process holds one object, and runs its coroutine methods, many at a time. Frames on a socket
carry the calls and their outcomes, pickled. Run as a module, this file is the process.

Invariants:
- A call ends with its outcome, with `ProcessDied`, or after its time limit with `CallTimeout`.
- The process ends with the one that started it, however that ends.
"""

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from rlinf_vl.rewards import GradingError
from rlinf_vl.rollout.env_executor import CallTimeout, plain_error
from rlinf_vl.rollout.faults import UserCodeError

log = logging.getLogger(__name__)

#: Seconds beyond its limit after which a call's process is taken to be stuck as a whole.
STUCK_S = 5.0
#: Calls that may hang in a process, each with a thread, before new calls go to another one.
MOST_HUNG = 8
#: Seconds that a killed process has to be gone.
CLOSE_S = 5.0
#: Length of a frame, before the frame.
_LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


class ProcessDied(Exception):
    """The process has ended; the message goes on from "the agent"."""


class UserProcess:
    """A process that holds the object which `make` returns.

    Attributes:
        hung: number of calls beyond their limit that still run there.
        users: number of those that have acquired it of a pool.
    """

    def __init__(self, make: Callable[[], Any], timeout_s: float) -> None:
        """
        Args:
            make: can be pickled; returns an object with coroutine methods, which limit their own
                time to `timeout_s`, and with `hung`.
            timeout_s: limit on a call.
        """
        self.hung = self.users = 0
        self._make, self._timeout_s = make, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._starting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._outcomes: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._check: asyncio.Task[None] | None = None
        self._ending = ""  # how it ended

    @property
    def is_usable(self) -> bool:
        """Whether it takes further calls."""
        return not self._ending and self.hung < MOST_HUNG

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object, and return its result.

        Raises:
            CallTimeout: it has not returned in time.
            ProcessDied: the process has ended.
            GradingError, UserCodeError: what the method raised.
        """
        try:
            async with asyncio.timeout(self._timeout_s + STUCK_S):
                return await self._call(method, *arguments)
        except ProcessDied:
            raise
        except BaseException as error:
            # A call that is given up may have stopped the interpreter, and with it all others.
            if isinstance(error, TimeoutError | CallTimeout | asyncio.CancelledError):
                self._check_soon()
            if isinstance(error, TimeoutError):
                raise CallTimeout from error
            raise

    def kill(self) -> None:
        """End the process, and its calls with `ProcessDied`."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        self.kill()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        # Shielded: others wait for the start, too.
        await asyncio.shield(self._starting)
        if self._ending:
            raise ProcessDied(f"lost its process, which had ended {self._ending}")
        number = next(self._numbers)
        outcome = self._outcomes[number] = asyncio.get_running_loop().create_future()
        try:
            self._send((number, method, arguments))
            return await outcome
        finally:
            del self._outcomes[number]

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the run, which ends this process itself.
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self._make)
        self._reading = asyncio.ensure_future(self._read(reader))

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(_frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out outcomes until the process ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frame = await _next_frame(reader)
                try:
                    number, self.hung, value, error = pickle.loads(frame)
                except Exception:
                    # Nobody knows whose outcome it is: end all calls rather than let one wait.
                    log.exception("an outcome of users' code can't be read")
                    self.kill()
                    continue
                outcome = self._outcomes.get(number)
                if outcome is None or outcome.done():
                    continue
                if error is None:
                    outcome.set_result(value)
                else:
                    outcome.set_exception(error)
        assert self._process is not None and self._writer is not None
        self._writer.close()
        code = await asyncio.to_thread(self._process.wait)
        self._ending = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.hung = 0
        unanswered = [outcome for outcome in self._outcomes.values() if not outcome.done()]
        for outcome in unanswered:
            outcome.set_exception(
                ProcessDied(
                    f"lost its process, which ended {self._ending} in {len(unanswered)} calls"
                )
            )

    def _check_soon(self) -> None:
        """Look whether the process still answers, and end it if it does not."""
        if self._writer is not None and (self._check is None or self._check.done()):
            self._check = asyncio.ensure_future(self._end_if_stuck())

    async def _end_if_stuck(self) -> None:
        with contextlib.suppress(ProcessDied):
            try:
                async with asyncio.timeout(STUCK_S):
                    await self._call("ping")
            except TimeoutError:
                log.warning("a process of users' code does not answer; it is ended")
                self.kill()


class UserProcessPool:
    """Processes for users' code, started when calls come; the least used one is taken."""

    def __init__(self, make: Callable[[], Any], timeout_s: float, size: int) -> None:
        """`make` and `timeout_s` are `UserProcess`'; `size` is the number of processes."""
        self._make_process = lambda: UserProcess(make, timeout_s)
        self._usable = [self._make_process() for _ in range(size)]
        #: Processes in which calls hang, until nobody uses them.
        self._retired: list[UserProcess] = []

    @property
    def hung(self) -> int:
        """The number of calls beyond their limit that still run."""
        return sum(process.hung for process in [*self._usable, *self._retired])

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in one of the processes, as `UserProcess.call`."""
        process = self.acquire()
        try:
            return await process.call(method, *arguments)
        finally:
            self.release(process)

    def acquire(self) -> UserProcess:
        """Return the process with the fewest users; those that take no calls are replaced."""
        for number, process in enumerate(self._usable):
            if not process.is_usable:
                self._retired.append(process)
                self._usable[number] = self._make_process()
        process = min(self._usable, key=lambda process: process.users)
        process.users += 1
        self._end_retired()
        return process

    def release(self, process: UserProcess) -> None:
        """Note that one user of a process less is there."""
        process.users -= 1
        self._end_retired()

    def close(self) -> None:
        """End all processes."""
        for process in [*self._usable, *self._retired]:
            process.close()

    def _end_retired(self) -> None:
        for process in [process for process in self._retired if not process.users]:
            process.kill()
            self._retired.remove(process)


def _frame(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def _next_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


# --- in the process -------------------------------------------------------------------------------


class _Calls:
    """The calls in this process."""

    def __init__(self, target: Any, writer: asyncio.StreamWriter) -> None:
        self._target, self._writer = target, writer
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, number: int, method: str, arguments: tuple) -> None:
        task = asyncio.ensure_future(self._run(number, method, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, method: str, arguments: tuple) -> None:
        value = error = None
        try:
            if method != "ping":
                value = await getattr(self._target, method)(*arguments)
        except (CallTimeout, GradingError) as raised:  # which mean something to the caller
            error = raised
        except BaseException as raised:
            error = UserCodeError.of(plain_error(raised))
        try:
            frame = _frame((number, self._target.hung, value, error))
        except Exception as raised:  # a result of the user's that can't be pickled
            frame = _frame((number, self._target.hung, None, UserCodeError.of(raised)))
        self._writer.write(frame)
        await self._writer.drain()


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    target = pickle.loads(await _next_frame(reader))()
    calls = _Calls(target, writer)
    while True:
        calls.begin(*pickle.loads(await _next_frame(reader)))


def main() -> None:
    """Run calls until the other end of the socket is closed."""
    descriptor, parent = (int(text) for text in sys.argv[1:])
    # Whatever ends the parent, nothing of it may be left.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    # For `module:name` in a config, as in the parent.
    sys.path.append(os.getcwd())
    try:
        asyncio.run(_serve(socket.socket(fileno=descriptor)))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Threads that hang must not keep it.
    os._exit(0)


if __name__ == "__main__":
    main()
