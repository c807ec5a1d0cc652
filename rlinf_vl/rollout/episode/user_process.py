"""A process for users' code, so that a crash or a call that never returns ends it and not the engine.

The process holds one object, and runs its coroutine methods, many at a time. Frames on a socket
carry the calls and their outcomes, pickled; an outcome is of plain types and of classes of this
package, because users' classes exist in their process only. Run as a module, this file is the
process.

Invariants:
- A call ends with its outcome, with `ProcessDied`, or after its time limit with `CallTimeout`,
  which begins when the process is ready.
- An outcome that can't be read is an error of its call alone.
- The process ends with the one that started it, however that ends.
"""

import asyncio
import contextlib
import io
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlinf_vl.rewards import GradingError
from rlinf_vl.rollout.daemon_thread import in_daemon_thread
from rlinf_vl.rollout.episode.env_executor import CallTimeout, plain_error
from rlinf_vl.rollout.episode.faults import UserCodeError, error_text
from rlinf_vl.user_code import end_with_parent

log = logging.getLogger(__name__)

#: Seconds beyond its limit after which a call's process is taken to be stuck as a whole.
STUCK_S = 5.0
#: Calls that may hang in a process, each with a thread, before new calls go to another one.
MOST_HUNG = 8
#: Seconds that a killed process has to be gone.
CLOSE_S = 5.0
#: Seconds that a process has to start, which imports the users' files and all that they import.
START_S = 300.0
#: Seconds for which a place of a pool whose process did not start gets no calls if others can.
RETRY_S = 30.0
#: Seconds after a process's end in which its last outcomes are read.
DRAIN_S = 1.0
#: Length of a frame, before the frame.
_LENGTH = struct.Struct("!Q")
#: An outcome's call and the number of hung calls, before its pickled value and error.
_OUTCOME = struct.Struct("!qQ")
#: In place of a call's number in the frame that says that the process is ready.
_READY = -1
#: Modules with the classes of an outcome, beside this package's own; numpy's make its arrays.
_PLAIN_MODULES = ("collections", "datetime", "decimal", "pathlib", "uuid", "numpy")
_PLAIN_BUILTINS = ("bytearray", "complex", "frozenset", "range", "set", "slice")


class ProcessDied(Exception):
    """The process has ended; the message goes on from "the agent"."""


class UserProcess:
    """A process that holds the object which `make` returns.

    Attributes:
        hung: number of calls beyond their limit that still run there.
        users: number of those that have acquired it of a pool.
        is_ready: whether it has started and takes calls.
    """

    def __init__(self, make: Callable[[], Any], timeout_s: float) -> None:
        """
        Args:
            make: can be pickled; returns an object with coroutine methods, which limit their own
                time to `timeout_s`, and with `hung`.
            timeout_s: limit on a call, without the start.
        """
        self.hung = self.users = 0
        self.is_ready = False
        self._make, self._timeout_s = make, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
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
        await self.start()
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

    async def start(self) -> None:
        """Wait until the process takes calls. Raises ProcessDied: it did not start, or has ended."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        # Shielded: others wait for the start, too.
        await asyncio.shield(self._starting)
        if self._ending:
            raise ProcessDied(f"lost its process, which had ended {self._ending}")

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
        """Start the process; a failure is in `_ending`, and an error of its calls."""
        ready = self._outcomes[_READY] = asyncio.get_running_loop().create_future()
        try:
            await self._launch()
            async with asyncio.timeout(START_S):
                await ready
            self.is_ready = True
        except ProcessDied:
            pass  # `_ending` says how
        except TimeoutError:
            self._ending = f"its start after {START_S:g} s without a sign of life"
            self.kill()
        except Exception as error:
            self._ending = f"before its start: {error_text(error)}"
            self.kill()
        finally:
            del self._outcomes[_READY]

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C is for the run, which ends this process itself.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._watching = asyncio.ensure_future(self._watch(self._process, reader, self._writer))
        self._send(self._make)

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(_frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)))

    async def _watch(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Hand out outcomes until the process ends, then end the calls that have none."""
        reading = asyncio.ensure_future(self._read(reader))
        # The socket may outlive the process in what that has forked, so the process is watched.
        exit_code = asyncio.ensure_future(in_daemon_thread(process.wait))
        await asyncio.wait([reading, exit_code], return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            self.kill()
        code = await exit_code
        await asyncio.wait([reading], timeout=DRAIN_S)
        reading.cancel()
        writer.close()
        # The reason of a failed start stays.
        if not self._ending:
            self._ending = (
                f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            )
        self.hung, self.is_ready = 0, False
        unanswered = [outcome for outcome in self._outcomes.values() if not outcome.done()]
        for outcome in unanswered:
            outcome.set_exception(
                ProcessDied(
                    f"lost its process, which ended {self._ending} in {len(unanswered)} calls"
                )
            )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out outcomes until the stream ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frame = await _next_frame(reader)
                number, self.hung = _OUTCOME.unpack_from(frame)
                outcome = self._outcomes.get(number)
                if outcome is None or outcome.done():
                    continue
                try:
                    value, error = _PlainUnpickler(io.BytesIO(frame[_OUTCOME.size :])).load()
                except Exception as unreadable:
                    value, error = None, UserCodeError.of(unreadable)
                if error is None:
                    outcome.set_result(value)
                else:
                    outcome.set_exception(error)

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
    """Processes for users' code, started when calls come; the least used one is taken.

    Attributes:
        start_limit_s: longest wait for a process: each may take `START_S` to fail.
    """

    def __init__(self, make: Callable[[], Any], timeout_s: float, size: int) -> None:
        """`make` and `timeout_s` are `UserProcess`'; `size` is the number of processes."""
        self.start_limit_s = START_S * (size + 1)
        self._make_process = lambda: UserProcess(make, timeout_s)
        self._usable = [self._make_process() for _ in range(size)]
        #: When the last start failed, by place.
        self._failure_times = [-math.inf] * size
        #: Processes in which calls hang, until nobody uses them.
        self._retired: list[UserProcess] = []

    @property
    def hung(self) -> int:
        """The number of calls beyond their limit that still run."""
        return sum(process.hung for process in [*self._usable, *self._retired])

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in one of the processes, as `UserProcess.call`."""
        process = await self.acquire()
        try:
            return await process.call(method, *arguments)
        finally:
            self.release(process)

    async def acquire(self) -> UserProcess:
        """Return the started process with the fewest users; those that take no calls are replaced.

        Raises:
            ProcessDied: no process starts.
        """
        while True:
            place = self._next_place()
            process = self._usable[place]
            process.users += 1
            try:
                await process.start()
                return process
            except BaseException as error:
                self.release(process)
                if not isinstance(error, ProcessDied):
                    raise
                self._failure_times[place] = time.monotonic()
                if not any(candidate.is_ready for candidate in self._usable):
                    raise

    def _next_place(self) -> int:
        """Return the place of the process for the next user; replace those that take no calls."""
        for place, process in enumerate(self._usable):
            if not process.is_usable:
                self._retired.append(process)
                self._usable[place] = self._make_process()
        self._end_retired()
        # A place whose process does not start has no users, and would attract every call.
        failed_after = time.monotonic() - RETRY_S

        def order(place: int) -> tuple[bool, int]:
            return self._failure_times[place] > failed_after, self._usable[place].users

        return min(range(len(self._usable)), key=order)

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


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of outcomes, which refuses users' classes."""

    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        is_plain = package in (*_PLAIN_MODULES, "rlinf_vl")
        if is_plain or module == "builtins" and name in _PLAIN_BUILTINS:
            return super().find_class(module, name)
        raise TypeError(
            f"its result holds an object of {module}.{name}; return plain types (numbers, strings, "
            "lists, dictionaries, numpy arrays)"
        )


def _frame(data: bytes) -> bytes:
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
        except CallTimeout:
            error = CallTimeout()
        except GradingError as raised:
            # Of the base class: the user's may be one that only this process knows.
            error = GradingError(str(raised))
        except BaseException as raised:
            error = UserCodeError.of(plain_error(raised))
        self._writer.write(_outcome_frame(number, self._target.hung, value, error))
        await self._writer.drain()


def _outcome_frame(number: int, hung: int, value: Any, error: Exception | None) -> bytes:
    """Return the frame of a call's outcome; its number stands apart, where it can always be read."""
    try:
        data = pickle.dumps((value, error), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as raised:  # a result of the user's that can't be pickled
        data = pickle.dumps((None, UserCodeError.of(raised)), protocol=pickle.HIGHEST_PROTOCOL)
    return _frame(_OUTCOME.pack(number, hung) + data)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    target = pickle.loads(await _next_frame(reader))()
    writer.write(_outcome_frame(_READY, 0, None, None))
    calls = _Calls(target, writer)
    while True:
        calls.begin(*pickle.loads(await _next_frame(reader)))


def main() -> None:
    """Run calls until the other end of the socket is closed."""
    descriptor, parent = (int(text) for text in sys.argv[1:])
    # Whatever ends the parent, nothing of it may be left.
    end_with_parent(parent)
    # Else a command that the user's code starts keeps it open when this process has ended.
    os.set_inheritable(descriptor, False)
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
