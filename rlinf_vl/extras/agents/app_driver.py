"""Runs agents that live in a task app: one request a trajectory, in which the app calls the policy.

docs/remote.md has the protocol, examples/task_app/ a server.
"""

import os
import secrets
import socket
from contextlib import suppress
from typing import Any

import httpx

from rlinf_vl.data.unusable import shorten
from rlinf_vl.extras.agents.contract import AgentTask
from rlinf_vl.extras.agents.drivers import AgentFailed
from rlinf_vl.extras.remote.client import AppClient, RemoteError

PROTOCOL = 2
#: Most bytes of a reply: a result has numbers and a text.
MAX_REPLY = 2**20
#: Environment variable with the app's bearer token, for one that wants a token.
TOKEN_ENV = "TASK_APP_TOKEN"
#: Seconds for which a request is repeated while the app can't be reached.
RETRY_S = 30.0
#: Fields of protocol 1's `info` that say something of one turn.
FACTS_OF_A_TURN = ("state", "tool_calls")


def agents_app(url: str, timeout_s: float) -> AppClient:
    """Return the client of an agent's app. Raises ValueError: the address or the token is
    invalid."""
    token_env = TOKEN_ENV if os.environ.get(TOKEN_ENV) else None
    hint = f"export {TOKEN_ENV} with it, on every machine before its Ray starts"
    return AppClient(url, token_env, timeout_s, MAX_REPLY, 0, hint)


class AppDriver:
    """An `AgentDriver` of a task app: `POST rollout` with the task, and the policy's endpoint and key.

    Attributes:
        timeout_s: limit on a trajectory.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        reward_bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """
        Args:
            url: the app's address.
            reward_bounds: the least and the largest reward.

        Raises:
            ValueError: the address is invalid, or there is no usable token.
        """
        self.timeout_s = timeout_s
        self._app = agents_app(url, timeout_s)
        self._reward_min, self._reward_max = reward_bounds
        self._is_open = False

    @property
    def hung(self) -> int:
        return 0

    async def run(self, task: AgentTask, url: str, key: str) -> Any:
        if not self._is_open:
            self._is_open = True
            # In the event loop that asks: a pool of connections belongs to one.
            self._app.open()
        # All that an app needs to begin, so that it keeps nothing of a run.
        body = {
            "protocol": PROTOCOL,
            "id": secrets.token_hex(16),
            "problem": task.row,
            "seed": task.seed,
            "group_seed": task.group_seed,
            "reward_min": self._reward_min,
            "reward_max": self._reward_max,
            "base_url": url,
            "api_key": key,
            "timeout": self.timeout_s,
        }
        try:
            reply, _ = await self._app.ask("POST", "rollout", RETRY_S, body)
        except RemoteError as error:
            raise AgentFailed(f"failed in its app: {error}") from error
        info = reply.get("info") or {}
        if not isinstance(info, dict):
            raise AgentFailed(f"gave the info {shorten(repr(info))}, which is no object")
        # The reward beside the info, as in protocol 1, whose facts of a turn mean nothing here.
        fields = {name: value for name, value in info.items() if name not in FACTS_OF_A_TURN}
        return {"reward": reply.get("reward"), **fields}

    def close(self) -> None:
        """Do nothing: connections end with the worker, and calls of the app are refused."""


def address_towards(url: str) -> str:
    """Return this machine's address on the way to `url`: where what runs there reaches it.

    Raises:
        OSError: there is no way to it.
    """
    target = httpx.URL(url)
    infos = socket.getaddrinfo(target.host, target.port or 80, type=socket.SOCK_DGRAM)
    # A name may have addresses of IPv6 first, to which this machine has no way.
    for family, _, _, _, address in infos:
        # A datagram socket sends nothing to connect; it only finds the way.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as finder:
            finder.connect(address)
            return finder.getsockname()[0]
    raise OSError(f"there is no way from this machine to {target.host}, the host of {url}")
