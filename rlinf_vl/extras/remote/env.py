"""Episodes played by a task app over HTTP; docs/remote.md has the protocol, examples/task_app/ a
server.

The app's replies are not trusted: sizes, times and types are bounded and checked, and no address in
a reply is fetched. Any fault of a reply is an error of its episode.
"""

import base64
import json
import math
import secrets
from contextlib import suppress
from typing import Any

from rlinf_vl.data.clips import is_clip
from rlinf_vl.data.data_uris import messages_with_data
from rlinf_vl.data.images import image_size, to_image_ref
from rlinf_vl.data.unusable import shorten
from rlinf_vl.envs.base import StepResult
from rlinf_vl.extras.remote.client import AppClient, RemoteError
from rlinf_vl.types import ROLES, ImageRef, Message, Problem

PROTOCOL = 1
#: Most characters of a step's `info`, as JSON.
_MAX_INFO = 2**16
#: URL scheme under which a message names an image of a multipart reply.
_PART = "cid:"


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
        self._app = AppClient(url, token_env, timeout_s, max_reply_bytes, max_images)
        self._retry_s, self._max_images, self._max_pixels = retry_s, max_images, max_pixels
        self._facts = {
            "seed": seed,
            "group_seed": group_seed,
            "reward_max": reward_max,
            "reward_min": reward_min,
        }
        self._id = secrets.token_hex(16)
        self._started, self._turn = False, 0
        self._clip_urls: set[str] = set()  # of the row's videos

    async def start(self, problem: Problem) -> list[Message]:
        self._app.open()
        app, _ = await self._app.ask("GET", "info", self._retry_s)
        if app.get("protocol") != PROTOCOL:
            raise RemoteError(
                f"{self._app.url}/info names protocol {shorten(repr(app.get('protocol')))}; {PROTOCOL} "
                "is spoken here"
            )
        row = {
            "id": problem.id,
            "answer": problem.answer,
            "columns": problem.columns,
            "messages": messages_with_data(problem),
        }
        self._clip_urls = {image.url for image in problem.images if is_clip(image)}
        # Set before the request, because the app may start the episode and its reply may be lost.
        self._started = True
        reply, parts = await self._app.ask(
            "POST", "start", self._retry_s, self._facts | {"id": self._id, "problem": row}
        )
        return self._messages(reply, parts)

    async def step(self, response: str) -> StepResult:
        body = {"id": self._id, "turn": self._turn, "response": response}
        reply, parts = await self._app.ask("POST", "step", self._retry_s, body)
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
        try:
            if self._started:
                # an app that can't be reached ends idle episodes by itself
                with suppress(RemoteError):
                    await self._app.ask("POST", "close", 0.0, {"id": self._id})
        finally:
            await self._app.close()

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
                isinstance(part, dict) and part.get("type") in ("image_url", "video_url")
                for part in content
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
            # The row's videos alone, as they were sent: no file of a stranger is decoded.
            case {"type": "video_url", "video_url": {"url": str(url)}} if (
                clip_url := _clip_url(url)
            ) in self._clip_urls:
                return {"type": "video_url", "video_url": {"url": clip_url}}
            case _:
                raise RemoteError(
                    f"{shorten(repr(part))} is neither text nor an image_url with a data URI or "
                    f"{_PART}NAME nor a video_url of the row"
                )
        height, width = image_size(image)
        if height * width > self._max_pixels:
            raise RemoteError(
                f"an image of {height} x {width} has more than max_pixels={self._max_pixels:,}"
            )
        return {"type": "image", "image": image.data}


def _clip_url(uri: str) -> str:
    """Return the address of the clip that a data URI holds; "" if it can't be read."""
    try:
        return ImageRef.of(base64.b64decode(uri.partition(",")[2], validate=True)).url
    except ValueError:
        return ""
