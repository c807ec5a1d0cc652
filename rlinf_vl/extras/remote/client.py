"""Requests to a task app over HTTP. Nothing that it replies is trusted, and no redirect is followed."""

import asyncio
import json
import logging
import os
import ssl
from email.message import Message as Headers
from email.parser import BytesHeaderParser
from functools import cache
from typing import Any

import httpx

from rlinf_vl.data.unusable import shorten
from rlinf_vl.envs.base import STRICT_JSON

#: Statuses of an app that is busy or restarting: the request is repeated, as after a failed
#: connection.
_BUSY = (429, 502, 503, 504)
#: Seconds between attempts: the first wait, doubled each time, and the longest one.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
#: Seconds after which an idle connection is closed. Servers close theirs after 5 s or more, and a
#: request on a connection that is just being closed fails.
_KEEP_ALIVE_S = 2.0

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for each request


class RemoteError(RuntimeError):
    """The task app can't be reached, or its reply can't be used."""


class AppClient:
    """The client of one app.

    A request that gets no answer, or that of a busy app, is sent again. So an app answers a repeated
    request with the same reply.

    Attributes:
        url: the app's address, without a slash at its end.
    """

    def __init__(
        self,
        url: str,
        token_env: str | None,
        timeout_s: float,
        max_reply_bytes: int,
        max_parts: int,
        token_hint: str = "name the variable that holds it in token_env",
    ) -> None:
        """
        Args:
            token_env: name of the environment variable that holds the bearer token, or None.
            timeout_s: time for one attempt, from connecting to the last byte.
            max_reply_bytes, max_parts: bounds of a reply, and of its parts besides the JSON.
            token_hint: what to do where the app wants a token and has none.

        Raises:
            ValueError: the address is invalid, or there is no usable token.
        """
        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise ValueError(f"url: {url!r} is no address: {error}") from None
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(
                f"url: {url!r} is no address of an app; write it as in http://localhost:8000"
            )
        if address.userinfo:
            raise ValueError(
                f"url: the address of {address.host} has a user in it; name a variable with a "
                "token in token_env"
            )
        if address.query or address.fragment:
            raise ValueError(f"url: {url!r} must end with a path; leave out what follows ? or #")
        self.url = str(address).rstrip("/")
        self._token_env, self._token = token_env, _token(token_env)
        self._token_hint, self._timeout_s = token_hint, timeout_s
        self._max_bytes, self._max_parts = max_reply_bytes, max_parts
        self._client: httpx.AsyncClient | None = None

    def open(self) -> None:
        """Make the connections' pool, in the event loop that asks."""
        headers = {"Accept": "multipart/related, application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._client = httpx.AsyncClient(
            verify=_tls(),
            trust_env=False,
            timeout=self._timeout_s,
            headers=headers,
            # As many as there are episodes: an agent's rollout keeps one to its end.
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S),
        )

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def ask(
        self, method: str, path: str, retry_s: float, body: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Send a request, and again for `retry_s` seconds while the app does not answer.

        Returns:
            (the reply's JSON object, its images by name).
        """
        content = None if body is None else json.dumps(body, default=str).encode()
        loop = asyncio.get_running_loop()
        deadline, wait_s = loop.time() + retry_s, _FIRST_WAIT_S
        while True:
            try:
                status, headers, data = await self._attempt(method, path, content)
                trouble = f"status {status}"
            except (httpx.TransportError, TimeoutError) as error:
                # A failed connection is treated like a busy app.
                status, headers, data, trouble = (
                    503,
                    httpx.Headers(),
                    b"",
                    f"{type(error).__name__} {error}".strip(),
                )
            if status not in _BUSY:
                break
            if loop.time() + wait_s > deadline:
                raise RemoteError(
                    f"{self.url}/{path} doesn't answer, asked for {retry_s:g} s: "
                    f"{self._safe(trouble)}"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        if status != 200:
            raise RemoteError(f"{self.url}/{path}: {self._refusal(path, status, headers, data)}")
        try:
            return self._read(headers.get("content-type", ""), data)
        except (ValueError, RecursionError) as error:
            raise RemoteError(
                f"{self.url}/{path}: {self._safe(f'{type(error).__name__}: {error}')}"
            ) from None

    async def _attempt(
        self, method: str, path: str, content: bytes | None
    ) -> tuple[int, httpx.Headers, bytes]:
        """Send a request once; return status, headers and body. Reading stops at
        `max_reply_bytes`."""
        if self._client is None:
            raise RuntimeError("remote: step() without start()")
        kind = {} if content is None else {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(self._timeout_s),
            self._client.stream(
                method, f"{self.url}/{path}", content=content, headers=kind
            ) as reply,
        ):
            # The bound counts the bytes as they arrive, and compressed ones could expand beyond it.
            if reply.headers.get("content-encoding", "identity") != "identity":
                raise RemoteError(
                    f"{self.url}/{path} compresses its reply, though it was asked not to"
                )
            length, data = int(reply.headers.get("content-length", 0)), bytearray()
            async for chunk in reply.aiter_raw():
                data += chunk
                # The announced length counts, too, so that a large reply is refused at its first chunk.
                if max(len(data), length) > self._max_bytes:
                    raise RemoteError(
                        f"{self.url}/{path} replies with more than "
                        f"max_reply_bytes={self._max_bytes:,}"
                    )
            return reply.status_code, reply.headers, bytes(data)

    def _refusal(self, path: str, status: int, headers: httpx.Headers, data: bytes) -> str:
        """Return the message for a status other than 200."""
        if status in (401, 403):
            hint = f"is that in {self._token_env} right?" if self._token_env else self._token_hint
            return f"status {status}: it wants another token; {hint}"
        if 300 <= status < 400:
            return f"status {status}: it redirects to {self._safe(headers.get('location', ''))}, and no redirect is followed"
        reply_text = self._safe(data.decode(errors="replace"))
        lost = (
            "; it was started again, or gave the episode up"
            if status in (404, 410) and path == "step"
            else ""
        )
        return f"status {status}{lost}: {reply_text}"

    def _safe(self, text: str) -> str:
        """Return a text of the app or the network, shortened and without the token."""
        return shorten(text.replace(self._token, "***") if self._token else text, 300)

    def _read(self, kind: str, data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return a reply's JSON object, and the other parts of a multipart reply by name.

        Raises ValueError, RecursionError.
        """
        head, parts = Headers(), dict[str, bytes]()
        head["content-type"] = kind
        if head.get_content_maintype() == "multipart":
            parts = _parts(data, str(head.get_boundary("")).encode(), self._max_parts + 1)
            if "reply" not in parts:
                raise ValueError(f"a multipart reply without a part named reply: {sorted(parts)}")
            data = parts.pop("reply")
        reply = STRICT_JSON.decode(data.decode())
        if not isinstance(reply, dict):
            raise ValueError(f"{shorten(repr(reply))} is no JSON object")
        # The policy sees the reply and the run records it, so the token must not be in it.
        encoded = json.dumps(reply, ensure_ascii=False).encode()  # raises for half a surrogate pair
        if self._token and any(
            self._token.encode() in content for content in (encoded, *parts.values())
        ):
            raise ValueError("it sends the token back")
        return reply, parts


def _token(variable: str | None) -> str:
    """Return the token in a variable; "" for no variable. Errors never quote the variable's
    value."""
    if variable is None:
        return ""
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(
            f"token_env: the environment variable {variable} is not set; export it before the "
            "run's Ray starts"
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            f"token_env: what {variable} holds is no token: it has blanks, line ends or letters "
            "beyond ASCII"
        )
    if len(token) < 8:
        raise ValueError(
            f"token_env: what {variable} holds is shorter than 8 characters, which any text might "
            "contain"
        )
    return token


def _parts(data: bytes, boundary: bytes, max_parts: int) -> dict[str, bytes]:
    """Return the parts of a multipart body, by the name in their Content-Disposition or else their
    Content-ID.

    Raises ValueError.
    """
    if not boundary:
        raise ValueError("a multipart reply without a boundary")
    # The last piece, behind the final boundary, begins with "--".
    _, *pieces = (b"\r\n" + data).split(b"\r\n--" + boundary, max_parts + 2)
    if len(pieces) > max_parts + 1 or not pieces or not pieces[-1].startswith(b"--"):
        raise ValueError(f"a multipart reply that does not end, or has more than {max_parts} parts")
    out = {}
    for part in pieces[:-1]:
        head, end, content = part.partition(b"\r\n\r\n")
        headers = (
            BytesHeaderParser().parsebytes(head.removeprefix(b"\r\n") + b"\r\n\r\n")
            if end
            else Headers()
        )
        name = headers.get_param("name", header="content-disposition") or str(
            headers.get("content-id", "")
        ).strip("<> ")
        if not isinstance(name, str) or not name or name in out:
            raise ValueError("a part of a multipart reply has no name of its own")
        out[name] = content
    return out


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
