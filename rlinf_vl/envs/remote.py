"""Episodes played by a task app over HTTP; docs/remote.md has the protocol, examples/task_app/ a
server.

The app's replies are not trusted: sizes, times and types are bounded and checked, and no address in
a reply is fetched. Any fault of a reply is an error of its episode.
"""

import asyncio
import base64
import json
import logging
import math
import os
import secrets
import ssl
from contextlib import suppress
from email.message import Message as Headers
from email.parser import BytesHeaderParser
from functools import cache
from typing import Any

import httpx

from rlinf_vl.data.images import image_size, to_image_ref
from rlinf_vl.data.unusable import shorten
from rlinf_vl.envs.base import STRICT_JSON, StepResult
from rlinf_vl.types import IMAGE_URL_PREFIX, ROLES, Message, Problem

PROTOCOL = 1
#: Statuses of an app that is busy or restarting: the request is repeated, as after a failed
#: connection.
_BUSY = (429, 502, 503, 504)
#: Seconds between attempts: the first wait, doubled each time, and the longest one.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
#: Most characters of a step's `info`, as JSON.
_MAX_INFO = 2**16
#: URL scheme under which a message names an image of a multipart reply.
_PART = "cid:"

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for each request


class RemoteError(RuntimeError):
    """The task app can't be reached, or its reply can't be used."""


class Remote:
    """An episode of a task app.

    Every request names the episode and the turn, and the app answers a repeated request with the
    same reply. So a request is simply sent again after a failed connection, also while the app
    restarts. An app that has lost the episode ends it.

    Args:
        url: the app's address, as in https://tasks.example.org:8000/shapes. No redirect is
            followed.
        token_env: name of the environment variable that holds the bearer token, on every machine
            with rollout workers; None: no token. The token itself is written nowhere else.
        timeout_s: time for one attempt, from connecting to the last byte.
        retry_s: time for which an unanswered request is repeated. Should be well below
            `rollout.turn_timeout`.
        max_reply_bytes, max_images: bounds of a reply.
        max_pixels: bound of each image.

    Raises:
        ValueError: the address or a limit is invalid, or there is no usable token.
    """

    #: Keywords that a row of the data may not set, because it could send the token to any address.
    config_only = ("url", "token_env")

    def __init__(
        self,
        *,
        url: str,
        token_env: str | None = None,
        timeout_s: float = 20.0,
        retry_s: float = 30.0,
        max_reply_bytes: int = 2**24,
        max_images: int = 16,
        max_pixels: int = 2**22,
        seed: int,
        group_seed: int,
        reward_max: float,
        reward_min: float,
    ) -> None:
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
        limits = {
            "timeout_s": timeout_s,
            "max_reply_bytes": max_reply_bytes,
            "max_images": max_images,
        }
        for name, value in (limits | {"max_pixels": max_pixels}).items():
            if not value > 0:
                raise ValueError(f"{name}: {value} must be > 0")
        if not retry_s >= 0:
            raise ValueError(f"retry_s: {retry_s} must be >= 0")
        self._url = str(address).rstrip("/")
        self._token_env, self._token = token_env, _token(token_env)
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._max_bytes, self._max_images, self._max_pixels = (
            max_reply_bytes,
            max_images,
            max_pixels,
        )
        self._facts = {
            "seed": seed,
            "group_seed": group_seed,
            "reward_max": reward_max,
            "reward_min": reward_min,
        }
        self._id = secrets.token_hex(16)
        self._started, self._turn = False, 0
        self._client: httpx.AsyncClient | None = None

    async def start(self, problem: Problem) -> list[Message]:
        headers = {"Accept": "multipart/related, application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._client = httpx.AsyncClient(
            verify=_tls(), trust_env=False, timeout=self._timeout_s, headers=headers
        )
        app, _ = await self._ask("GET", "info", self._retry_s)
        if app.get("protocol") != PROTOCOL:
            raise RemoteError(
                f"{self._url}/info names protocol {shorten(repr(app.get('protocol')))}; {PROTOCOL} "
                "is spoken here"
            )
        row = {
            "id": problem.id,
            "answer": problem.answer,
            "columns": problem.columns,
            "messages": _with_images(problem),
        }
        # Set before the request, because the app may start the episode and its reply may be lost.
        self._started = True
        reply, parts = await self._ask(
            "POST", "start", self._retry_s, self._facts | {"id": self._id, "problem": row}
        )
        return self._messages(reply, parts)

    async def step(self, response: str) -> StepResult:
        body = {"id": self._id, "turn": self._turn, "response": response}
        reply, parts = await self._ask("POST", "step", self._retry_s, body)
        # Only after the reply, because a repeated request must name the same turn.
        self._turn += 1
        reward, done, info = (reply.get(name) for name in ("reward", "done", "info"))
        if (
            isinstance(reward, bool)
            or not isinstance(reward, (int, float))
            or not math.isfinite(reward)
        ):
            raise RemoteError(f"reward is {shorten(repr(reward))}, no finite number")
        if not isinstance(done, bool):
            raise RemoteError(f"done is {shorten(repr(done))}, neither true nor false")
        if not isinstance(info, (dict, type(None))):
            raise RemoteError(f"info is {shorten(repr(info))}, no object")
        if len(json.dumps(info)) > _MAX_INFO:
            raise RemoteError(f"info has more than {_MAX_INFO:,} characters: {shorten(repr(info))}")
        return StepResult(self._messages(reply, parts), float(reward), done, info or {})

    async def close(self) -> None:
        client = self._client
        if client is None:
            return
        try:
            if self._started:
                # an app that can't be reached ends idle episodes by itself
                with suppress(RemoteError):
                    await self._ask("POST", "close", 0.0, {"id": self._id})
        finally:
            self._client = None
            await client.aclose()

    async def _ask(
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
                    f"{self._url}/{path} doesn't answer, asked for {retry_s:g} s: "
                    f"{self._safe(trouble)}"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        if status != 200:
            raise RemoteError(f"{self._url}/{path}: {self._refusal(path, status, headers, data)}")
        try:
            return self._read(headers.get("content-type", ""), data)
        except (ValueError, RecursionError) as error:
            raise RemoteError(
                f"{self._url}/{path}: {self._safe(f'{type(error).__name__}: {error}')}"
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
                method, f"{self._url}/{path}", content=content, headers=kind
            ) as reply,
        ):
            # The bound counts the bytes as they arrive, and compressed ones could expand beyond it.
            if reply.headers.get("content-encoding", "identity") != "identity":
                raise RemoteError(
                    f"{self._url}/{path} compresses its reply, though it was asked not to"
                )
            length, data = int(reply.headers.get("content-length", 0)), bytearray()
            async for chunk in reply.aiter_raw():
                data += chunk
                # The announced length counts, too, so that a large reply is refused at its first chunk.
                if max(len(data), length) > self._max_bytes:
                    raise RemoteError(
                        f"{self._url}/{path} replies with more than "
                        f"max_reply_bytes={self._max_bytes:,}"
                    )
            return reply.status_code, reply.headers, bytes(data)

    def _refusal(self, path: str, status: int, headers: httpx.Headers, data: bytes) -> str:
        """Return the message for a status other than 200."""
        if status in (401, 403):
            hint = (
                f"is that in {self._token_env} right?"
                if self._token_env
                else "name the variable that holds it in token_env"
            )
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
            parts = _parts(data, str(head.get_boundary("")).encode(), self._max_images + 1)
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

    def _messages(self, reply: dict[str, Any], parts: dict[str, bytes]) -> list[Message]:
        """Check the messages of a reply and return them with images as bytes.

        Raises RemoteError, ImageError.
        """
        messages, image_count = reply.get("messages", []), 0
        if not isinstance(messages, list):
            raise RemoteError(f"messages are {shorten(repr(messages))}, no list")
        out: list[Message] = []
        for message in messages:
            role, content = (
                (message.get(name) for name in ("role", "content"))
                if isinstance(message, dict)
                else (None, None)
            )
            if role not in ROLES or not isinstance(content, (str, list)):
                raise RemoteError(
                    f"{shorten(repr(message))} is no message with content and one of the roles "
                    f"{', '.join(ROLES)}"
                )
            content = [{"type": "text", "text": content}] if isinstance(content, str) else content
            image_count += sum(
                isinstance(part, dict) and part.get("type") == "image_url" for part in content
            )
            if image_count > self._max_images:
                raise RemoteError(f"a reply with more than max_images={self._max_images}")
            out.append({"role": role, "content": [self._part(part, parts) for part in content]})
        return out

    def _part(self, part: Any, parts: dict[str, bytes]) -> dict[str, Any]:
        match part:
            case {"type": "text", "text": str(text)}:
                return {"type": "text", "text": text}
            # No other URLs are accepted, so that nothing is fetched for the app.
            case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
                image = to_image_ref(url, root=None)
            case {"type": "image_url", "image_url": {"url": str(url)}} if (
                url.removeprefix(_PART) in parts
            ):
                image = to_image_ref(parts[url.removeprefix(_PART)], root=None)
            case _:
                raise RemoteError(
                    f"{shorten(repr(part))} is neither text nor an image_url with a data URI or "
                    f"{_PART}NAME"
                )
        height, width = image_size(image)
        if height * width > self._max_pixels:
            raise RemoteError(
                f"an image of {height} x {width} has more than max_pixels={self._max_pixels:,}"
            )
        return {"type": "image", "image": image.data}


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


def _with_images(problem: Problem) -> list[Message]:
    """Return a problem's messages, with its images in them as data URIs."""
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}
    urls = {}
    for image in problem.images:
        kind = next(
            (kind for magic, kind in kinds.items() if bytes(image.data[:4]).startswith(magic)),
            "octet-stream",
        )
        urls[image.url] = f"data:image/{kind};base64,{base64.b64encode(image.data).decode()}"

    def inline(part: dict[str, Any]) -> dict[str, Any]:
        url = part.get("image_url", {}).get("url", "")
        return (
            {"type": "image_url", "image_url": {"url": urls[url]}}
            if url.startswith(IMAGE_URL_PREFIX)
            else part
        )

    return [
        m if isinstance(m["content"], str) else m | {"content": list(map(inline, m["content"]))}
        for m in problem.messages
    ]


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
