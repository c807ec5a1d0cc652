"""Run users' agents: a function in a thread, or a command in a process of its own."""

import asyncio
import importlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import psutil

from rlinf_vl.config.schema.rollout import AGENT_CALL
from rlinf_vl.data.unusable import shorten
from rlinf_vl.extras.agents import command_guard
from rlinf_vl.extras.agents.command_guard import OWNER, folder_prefix, owner_name
from rlinf_vl.extras.agents.contract import AgentTask
from rlinf_vl.user_code import bypass_proxies, load_code

#: Environment variable that marks an agent's processes; its value is the trajectory's key.
MARK = "RLINF_VL_AGENT"
#: Largest output of a command, in bytes. Beyond it the command is ended.
MAX_OUTPUT = 2**20
#: Seconds between two looks at a command's memory.
LOOK_S = 1.0
#: Seconds to wait for the end of processes that were killed.
KILL_S = 5.0


class AgentFailed(Exception):
    """An agent failed; the message goes on from "the agent"."""


class AgentDriver(Protocol):
    """Runs agents.

    Attributes:
        timeout_s: limit on an agent, from its start to its result.
    """

    timeout_s: float

    @property
    def hung(self) -> int:
        """The number of agents beyond their limit that can't be ended."""
        ...

    async def run(self, task: AgentTask, url: str, key: str) -> Any:
        """Run an agent with the endpoint at `url`; return its result, in any form of `result_of`.

        Raises:
            AgentFailed, CallTimeout: it failed, or took too long.
            Exception: what its function raised.
        """
        ...

    def close(self) -> None:
        """End the agents that are still running."""
        ...


class Executor(Protocol):
    """Calls functions and coroutine functions with a time limit, each in no one's way."""

    timeout_s: float

    @property
    def hung(self) -> int: ...
    async def call(self, function: Callable[[], Any], on_begin: Callable[[Any], None]) -> Any: ...


class FunctionDriver:
    """Calls `solve(task, client)`: a coroutine function in one event loop with all others, any
    other function in a thread of its own.

    Raises:
        CodeError: there is no such function.
    """

    def __init__(self, name: str, files: Mapping[str, str], executor: Executor) -> None:
        """`name` is `module:function` or `path/to/file.py:function`; `files` are
        `runner.code_files`."""
        # For clients that an agent makes itself.
        bypass_proxies()
        self._function = load_code(name, {}, files, kind="agent", signature=AGENT_CALL)
        # Here, where no agent's time limit runs: this import takes seconds.
        importlib.import_module("openai.resources.chat")
        self._executor = executor
        self.timeout_s = executor.timeout_s
        self._http_clients = HttpClients(self.timeout_s)

    @property
    def hung(self) -> int:
        return self._executor.hung

    async def run(self, task: AgentTask, url: str, key: str) -> Any:
        function: Callable[[], Any]
        if inspect.iscoroutinefunction(self._function):
            function = partial(self._solve_async, task, url, key)
        else:
            function = partial(self._solve, task, url, key)
        return await self._executor.call(function, lambda call: None)

    def close(self) -> None:
        """Do nothing: threads can't be ended, and their calls are refused."""

    async def _solve_async(self, task: AgentTask, url: str, key: str) -> Any:
        """Await an agent with a client of its own."""
        import openai

        http_client = self._http_clients.of_running_loop()
        client = openai.AsyncOpenAI(**self._options(url, key), http_client=http_client)
        return await self._function(task, client)

    def _solve(self, task: AgentTask, url: str, key: str) -> Any:
        """Call an agent with a client of its own."""
        import openai

        http_client = self._http_clients.of_threads()
        client = openai.OpenAI(**self._options(url, key), http_client=http_client)
        return self._function(task, client)

    def _options(self, url: str, key: str) -> dict[str, Any]:
        # No retries: a refused call is refused again, and a repeated one is another branch.
        return {"base_url": url, "api_key": key, "max_retries": 0, "timeout": self.timeout_s}


class HttpClients:
    """The HTTP clients that a process's agents share: to make one takes longer than a call."""

    def __init__(self, timeout_s: float) -> None:
        # Without TLS there is nothing to verify, and loading certificates takes 20 ms. The endpoint
        # is this worker's: a proxy would get the trajectory's key and messages.
        self._options = {"verify": False, "timeout": timeout_s, "trust_env": False}
        self._lock = threading.Lock()
        self._of_threads: Any = None
        self._of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    def of_running_loop(self) -> Any:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._of_loops:
            import openai

            class Shared(openai.DefaultAsyncHttpxClient):
                async def aclose(self) -> None:
                    """Do nothing: an agent that closes its client leaves others' connections alone."""

            self._of_loops[loop] = Shared(**self._options)
        return self._of_loops[loop]

    def of_threads(self) -> Any:
        """Return the client of all functions without `async def`."""
        with self._lock:
            if self._of_threads is None:
                import openai

                class Shared(openai.DefaultHttpxClient):
                    def close(self) -> None:
                        """Do nothing, as above."""

                self._of_threads = Shared(**self._options)
            return self._of_threads


class CommandDriver:
    """Runs a command for each trajectory, in a folder of its own that is removed afterwards.

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, and in RLINF_VL_TASK the path of the task
    (`AgentTask.as_json`). The last line of its output is the result, as JSON: a number, null, or
    the fields of an `AgentResult`.
    """

    def __init__(self, command: Sequence[str], timeout_s: float, memory_gb: float) -> None:
        """`memory_gb` limits the resident memory of all its processes together, in GiB."""
        self._command = list(command)
        self.timeout_s, self._memory_bytes = timeout_s, memory_gb * 2**30
        self._keys: set[str] = set()
        self._owner = owner_name(os.getpid())
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def hung(self) -> int:
        return 0

    async def run(self, task: AgentTask, url: str, key: str) -> Any:
        if self._guard is None:
            self._guard = start_guard(self._owner)
        self._keys.add(key)
        prefix = folder_prefix(self._owner)
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            task_path = folder / "task.json"
            await asyncio.to_thread(task_path.write_text, task.as_json(), encoding="utf-8")
            # Under OpenAI's names, which its clients read by themselves.
            environment = os.environ | {
                "OPENAI_BASE_URL": url,
                "OPENAI_API_KEY": key,
                "RLINF_VL_TASK": str(task_path),
                MARK: key,
                OWNER: self._owner,
            }
            bypass_proxies(environment)
            try:
                return await self._run(folder, environment, key)
            finally:
                self._keys.discard(key)
                # Also those that have left the group, or that outlived their parents.
                await asyncio.to_thread(end_processes, {key})

    def close(self) -> None:
        if self._keys:
            end_processes(self._keys)
        if self._guard is not None:
            # It ends with its input.
            self._guard.communicate()
            self._guard = None

    async def _run(self, folder: Path, environment: Mapping[str, str], key: str) -> Any:
        output, errors = bytearray(), bytearray()
        async with _pipe() as (output_stream, output_end), _pipe() as (error_stream, error_end):
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    cwd=folder,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output_end,
                    stderr=error_end,
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentFailed(f"did not start: {self._command[0]}: {error}") from error
            finally:
                os.close(output_end)
                os.close(error_end)
            reading = asyncio.ensure_future(_read(output_stream, output, MAX_OUTPUT))
            reading_errors = asyncio.ensure_future(_read_end(error_stream, errors))
            await self._until_end(process, reading, reading_errors, key)
        # A result that was written before a crash does not count.
        if process.returncode:
            raise AgentFailed(f"{_ending(process.returncode)}: {_last_lines(errors)}")
        return _result(output)

    async def _until_end(
        self,
        process: asyncio.subprocess.Process,
        reading: "asyncio.Future[None]",
        reading_errors: "asyncio.Future[None]",
        key: str,
    ) -> None:
        """Wait for the end of a command, or end it at one of its limits.

        Raises:
            AgentFailed: it was ended.
        """
        memory = asyncio.ensure_future(self._watch_memory(key))
        ended = asyncio.ensure_future(process.wait())
        work = [reading, reading_errors, memory, ended]
        try:
            async with asyncio.timeout(self.timeout_s):
                while not ended.done():
                    running = [task for task in (reading, memory, ended) if not task.done()]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in (reading, memory):
                        if task.done():
                            task.result()  # raises what ends the command
            _kill_group(process.pid)
            # A process that has left the group may hold the pipes for ever.
            await asyncio.wait([reading, reading_errors], timeout=KILL_S)
        except TimeoutError:
            raise AgentFailed(
                f"did not end within rollout.agent.timeout={self.timeout_s:g} s"
            ) from None
        finally:
            _kill_group(process.pid)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), KILL_S)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _watch_memory(self, key: str) -> None:
        """Raise AgentFailed once an agent's processes have more memory than they may."""
        while True:
            await asyncio.sleep(LOOK_S)
            used = (await asyncio.to_thread(_memory_look.by_key)).get(key, 0)
            if used > self._memory_bytes:
                raise AgentFailed(
                    f"used {used / 2**30:.2g} GiB, and rollout.agent.memory_gb is "
                    f"{self._memory_bytes / 2**30:g}"
                )


def start_guard(owner: str) -> "subprocess.Popen[bytes]":
    """Sweep for killed workers, and start the process that does so when this one is killed."""
    folder = tempfile.gettempdir()
    command_guard.sweep_ended(Path(folder))
    # Without site's packages: it starts within milliseconds, and keeps 10 MiB.
    return subprocess.Popen(
        [sys.executable, "-S", "-E", command_guard.__file__, owner, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the run
    )


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_processes(keys: set[str]) -> None:
    """Kill all processes with one of these keys in their environment, and wait for their end."""
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) in keys:
                process.kill()
                marked.append(process)
    psutil.wait_procs(marked, KILL_S)


class MemoryLook:
    """The resident memory of agents' processes. One look for all commands: there may be hundreds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._time = -math.inf
        self._totals: dict[str, int] = {}

    def by_key(self) -> dict[str, int]:
        """Return the resident bytes of all processes of each key, at most `LOOK_S` old."""
        with self._lock:
            if time.monotonic() - self._time > LOOK_S / 2:
                self._totals, self._time = self._measure(), time.monotonic()
            return self._totals

    def _measure(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        mark = f"{MARK}=".encode()
        page = os.sysconf("SC_PAGE_SIZE")
        keys: dict[int, str] = {}  # by process
        processes: list[tuple[int, int, int]] = []  # (process, session, resident bytes)
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                # The name, which stands in brackets, may hold anything.
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                processes.append((int(path.name), int(fields[3]), int(fields[21]) * page))
                # By the environment, which a child keeps in a session of its own.
                for entry in (path / "environ").read_bytes().split(b"\0"):
                    if entry.startswith(mark):
                        keys[int(path.name)] = entry[len(mark) :].decode()
        for pid, session, resident in processes:
            # One that has cleared its environment counts with the leader of its session.
            key = keys.get(pid) or keys.get(session)
            if key is not None:
                totals[key] = totals.get(key, 0) + resident
        return totals


_memory_look = MemoryLook()


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Yield the stream of a pipe, and the descriptor to write into it, which the caller closes.

    A pipe that asyncio makes for a process delays the news of its end while a child holds it.
    """
    read_end, write_end = os.pipe()
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
    )
    try:
        yield stream, write_end
    finally:
        transport.close()


async def _read(stream: asyncio.StreamReader, data: bytearray, limit: int) -> None:
    """Read a stream into `data`, to its end. Raises AgentFailed: it is longer than `limit`."""
    while piece := await stream.read(2**16):
        data += piece
        if len(data) > limit:
            raise AgentFailed(f"wrote more than {limit} bytes of output")


async def _read_end(stream: asyncio.StreamReader, data: bytearray) -> None:
    """Read a stream to its end, and keep the last part of it in `data`."""
    while piece := await stream.read(2**16):
        data += piece
        del data[:-4096]


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def _last_lines(data: bytearray) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    return shorten(" / ".join(lines[-3:]), 400) or "it wrote no error"


def _result(output: bytearray) -> Any:
    lines = output.decode(errors="replace").strip().splitlines()
    if not lines:
        raise AgentFailed("wrote no result: the last line of its output must be JSON")
    try:
        return json.loads(lines[-1])
    except ValueError as error:
        raise AgentFailed(f"wrote {shorten(lines[-1])!r} as its result: {error}") from error
