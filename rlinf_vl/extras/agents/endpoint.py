"""The chat endpoint of a rollout worker: OpenAI's API over HTTP, a key for each trajectory.

It listens on this machine only, and answers nothing without a key but `/health`. A key belongs to
one session and ends with it, so an agent can neither see another trajectory nor add to it.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.envs.base import STRICT_JSON
from rlinf_vl.extras.agents.chat import (
    ChatError,
    ChatRequest,
    Reply,
    chunks_json,
    completion_json,
    parse_chat,
)
from rlinf_vl.types import ImageRef

log = logging.getLogger(__name__)

#: Largest body of a request, in bytes; images are a third larger as text than as files.
MAX_BODY = 32 * 2**20
#: Bodies from this size on are parsed in a thread: decoding images holds up other answers.
IN_THREAD = 2**15
#: Seconds that the server has to start.
START_S = 30.0
#: Seconds after which the server closes an idle connection. Clients close theirs long before (httpx
#: after 5 s, uvicorn's default, too): a request on a connection that is just being closed fails.
KEEP_ALIVE_S = 600


#: The hosts that stand for all addresses of this machine.
ANY_ADDRESS = ("0.0.0.0", "::")


class Session(Protocol):
    """Answers the calls of one key."""

    async def complete(self, chat: ChatRequest) -> Reply:
        """Answer a call. Raises ChatError: it is refused."""
        ...

    def note_refusal(self) -> None:
        """Note that a request with the key was refused."""
        ...

    @property
    def images(self) -> Mapping[str, ImageRef]:
        """The images that messages may name, and those that were sent, by address."""
        ...

    @property
    def video(self) -> VideoConfig:
        """How videos that are sent are sampled."""
        ...


class Endpoint:
    """The server, in the event loop that starts it.

    Attributes:
        url: the address for clients, from `bind` on.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, model: str = "policy") -> None:
        """
        Args:
            host: the address to listen on.
            port: 0 for any that is free.
            model: the name in the list of models.
        """
        self.url = ""
        self._host, self._port, self._model = host, port, model
        self._sessions: dict[str, Session] = {}
        self._refusals: dict[str, ChatError] = {}  # by key: the first one, while the key is open
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None
        self._starting = asyncio.Lock()

    def bind(self) -> None:
        """Listen, before anything serves: whoever starts the server learns that it can't.

        Raises:
            OSError: the port is taken, or the host is no address of this machine.
        """
        try:
            self._listener = _listener(self._host, self._port)
        except OSError as error:
            address = f"{_in_url(self._host)}:{self._port}"
            reason = f"can't listen on {address}: {error.strerror}"
            raise OSError(error.errno, reason) from error
        self.url = f"http://{_in_url(self._host)}:{self._listener.getsockname()[1]}/v1"

    async def start(self) -> None:
        """Begin to serve; does nothing if it serves already.

        Raises:
            OSError: as `bind`, which it calls if that was not done.
        """
        async with self._starting:
            if self._serving is not None and not self._serving.done():
                return
            import uvicorn  # an extra of the package

            if self._listener is None:
                self.bind()
            # The server closes it.
            listener, self._listener = self._listener, None
            # No lifespan: what it serves is not its own to start and end.
            config = uvicorn.Config(
                self.app(),
                log_level="error",
                access_log=False,
                lifespan="off",
                backlog=1024,
                timeout_keep_alive=KEEP_ALIVE_S,
                # No proxy stands before it, and nobody reads who serves.
                proxy_headers=False,
                server_header=False,
                date_header=False,
            )
            self._server = _server_class()(config)
            self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
            # uvicorn tells of its start by a flag alone.
            async with asyncio.timeout(START_S):
                while not self._server.started:
                    await asyncio.sleep(0.005)

    def close(self) -> None:
        """End the server, as soon as its event loop runs."""
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            # An agent that is still connected must not hold up the worker's end.
            self._server.should_exit = self._server.force_exit = True

    async def wait_closed(self) -> None:
        """Wait until the server has ended."""
        if self._serving is not None:
            await asyncio.wait([self._serving])

    def open(self, session: Session, key: str | None = None) -> str:
        """Return a new key whose calls `session` answers; or use `key`."""
        # Long enough that nobody on the network guesses one within a trajectory.
        key = key or f"rlinf-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """End a key: its calls are refused from now on."""
        self._sessions.pop(key, None)
        self._refusals.pop(key, None)

    def refusal_of(self, key: str) -> ChatError | None:
        """Return why a request of this open key was refused first; None if none was."""
        return self._refusals.get(key)

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route

        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        # A page in somebody's browser must not reach it under a name of its own. A server for other
        # machines does not know its names.
        names = ["*"] if self._host in ANY_ADDRESS else [_in_url(self._host), "localhost"]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=names)
        return Starlette(routes=routes, middleware=[hosts])

    def refuse(self, error: ChatError) -> Any:
        """Return the HTTP response to a request that is refused."""
        return _response(error.as_json(), error.status)

    async def _health(self, request: Any) -> Any:
        return _response({"status": "ok"})

    async def _models(self, request: Any) -> Any:
        try:
            self._session_of(request)
        except ChatError as error:
            return self.refuse(error)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlinf_vl"}
        return _response({"object": "list", "data": [model]})

    async def _chat(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        session: Session | None = None
        try:
            session = self._session_of(request)
            body = await _body_of(request)
            if len(body) < IN_THREAD:
                chat = _parsed(body, session.images, session.video)
            else:
                chat = await asyncio.to_thread(_parsed, body, session.images, session.video)
            reply = await session.complete(chat)
        except ChatError as error:
            if session is not None:
                session.note_refusal()
            # A failure of the engine is no refusal.
            if error.status < 500 and (key := _key_of(request)) in self._sessions:
                self._refusals.setdefault(key, error)
            return self.refuse(error)
        except Exception:  # a fault of ours must not be taken for the agent's
            log.exception("a call of an agent failed")
            return self.refuse(ChatError("the server failed; its log has the error", 500))
        if chat.stream:
            return StreamingResponse(_events(chat, reply), media_type="text/event-stream")
        return _response(completion_json(chat, reply))

    def _session_of(self, request: Any) -> Session:
        """Return the session of a request's key. Raises ChatError: there is none."""
        # One lookup, whatever the key is: there is nothing to compare byte by byte.
        session = self._sessions.get(_key_of(request))
        if session is None:
            raise ChatError(
                "no valid key: each trajectory has a key of its own, which ends with it",
                401,
                "invalid_api_key",
            )
        return session


def _key_of(request: Any) -> str:
    """Return the key that a request gives; "" without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _in_url(host: str) -> str:
    """Return a host as addresses of the web write it: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first address of `host` that this machine has.

    Raises:
        OSError: there is none, or the port is taken.
    """
    # Both families at `::`, which stands for all addresses.
    both = host == "::" and socket.has_dualstack_ipv6()
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in infos[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_server(address, family=family, dualstack_ipv6=both)
    family, _, _, _, address = infos[-1]
    return socket.create_server(address, family=family, dualstack_ipv6=both)


def _server_class() -> type:
    import uvicorn

    class Server(uvicorn.Server):
        """A server that leaves the process's signals alone: they are for the run."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


def _response(body: dict[str, Any], status: int = 200) -> Any:
    from starlette.responses import Response

    # ASCII alone: halves of surrogate pairs, which errors may quote, have no other form.
    text = json.dumps(body, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


async def _body_of(request: Any) -> bytes:
    """Return a request's body. Raises ChatError: it is larger than `MAX_BODY`."""
    too_large = ChatError(f"the request is larger than {MAX_BODY} bytes", 413)
    if int(request.headers.get("content-length") or 0) > MAX_BODY:
        raise too_large
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


def _parsed(body: bytes, images: Mapping[str, ImageRef], video: VideoConfig) -> ChatRequest:
    try:
        decoded = STRICT_JSON.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise ChatError(f"the request is no JSON: {error}") from error
    return parse_chat(decoded, images, video)


async def _events(chat: ChatRequest, reply: Reply) -> AsyncIterator[str]:
    """Yield the server-sent events of a reply."""
    for chunk in chunks_json(chat, reply):
        # ASCII alone: clients take U+2028 and others for the end of a line, and with it of the data.
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
