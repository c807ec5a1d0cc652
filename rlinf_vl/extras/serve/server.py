"""A chat endpoint over a trained policy, for clients of OpenAI's API: `rlinf-vl serve RUN`.

It is the endpoint that agents call in training, without a run: nothing is recorded, any key of the
server's user is one, and a conversation may be as long as the model's context.
"""

import argparse
import asyncio
import json
import logging
import secrets
from pathlib import Path

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.driver.policy import Policy, load_policy
from rlinf_vl.errors import ConfigError, pip_install
from rlinf_vl.extras.agents.chat import ChatRequest, Reply
from rlinf_vl.extras.agents.endpoint import Endpoint
from rlinf_vl.extras.agents.first_calls import FirstCalls
from rlinf_vl.extras.agents.session import AgentLimits, AgentSession
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import ImageRef, Problem, SamplingParams

log = logging.getLogger("rlinf_vl")

#: Seconds within which the engine must answer a health check.
ALIVE_TIMEOUT_S = 60.0


class ServedPolicy:
    """Answers chat requests with a policy, each on its own."""

    def __init__(self, policy: Policy, sampling: SamplingParams) -> None:
        """Serve a policy; `sampling` is for requests that do not choose otherwise."""
        self._client = GenerationClient(policy.engine, policy.renderer, ALIVE_TIMEOUT_S)
        self._sampling = sampling
        self._limits = AgentLimits(
            max_calls=1,
            seq_length=policy.context_length,
            allow_sampling=True,
            seq_length_key="the model's context",
            video=policy.video,
        )

    @property
    def video(self) -> VideoConfig:
        """How videos that requests show are sampled."""
        return self._limits.video

    @property
    def images(self) -> dict[str, ImageRef]:
        """No images: there is no problem, and nothing is kept of a request."""
        return {}

    def note_refusal(self) -> None:
        """Do nothing: no other request waits for one that is refused."""

    async def complete(self, chat: ChatRequest) -> Reply:
        """Answer a request. Raises ChatError: it is refused, or the engine failed."""
        # A session of its own: what others ask must not become part of its conversation.
        state = RolloutState(Problem("chat", (), ""), secrets.randbits(31), 0, "")
        first_calls = FirstCalls(self._client)
        session = AgentSession(state, self._sampling, self._client, self._limits, first_calls)
        try:
            return await session.complete(chat)
        finally:
            await session.close()
            await first_calls.close()


def serve(
    folder: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    trust_run_code: bool = False,
) -> None:
    """Serve a policy until the process is interrupted.

    Args:
        folder, device, dtype, trust_run_code: as in `load_policy`.
        host: the address to listen on; 0.0.0.0 for all of this machine, :: with those of IPv6.
        port: 0 for any that is free.
        key: what clients must send as their API key; None for a new one.
        temperature: of requests that name none.
        max_new_tokens: limit on the reply of requests that name none, and of all others.

    Raises:
        ConfigError: there is no such policy, a package is missing, or the port is taken.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"serve needs a package that is not installed ({error.name}): "
            + pip_install("rlinf_vl[agents]")
        ) from error
    # Before the port is taken: to load takes minutes, and a mistake in the name half a second.
    policy = load_policy(folder, device=device, dtype=dtype, trust_run_code=trust_run_code)
    sampling = SamplingParams(temperature, 1.0, 0, max_new_tokens, policy.stop_ids)
    endpoint = Endpoint(host, port, Path(folder).name)
    try:
        asyncio.run(_serve(endpoint, ServedPolicy(policy, sampling), key))
    except OSError as error:
        raise ConfigError(f"serve: {error.strerror}; try --port 0, or another --host") from error
    finally:
        policy.close()


async def _serve(endpoint: Endpoint, served: ServedPolicy, key: str | None) -> None:
    await endpoint.start()
    key = endpoint.open(served, key)
    log.info("serving at %s, with the API key %s; Ctrl-C ends it. Try it:", endpoint.url, key)
    print(curl_line(endpoint.url, key), flush=True)
    try:
        await endpoint.wait_closed()
    finally:
        endpoint.close()
        await endpoint.wait_closed()


def curl_line(url: str, key: str) -> str:
    """Return a command line that asks the endpoint a question."""
    request = {"model": "policy", "messages": [{"role": "user", "content": "Who are you?"}]}
    return (
        f"curl {url}/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{json.dumps(request)}'"
    )


def main(arguments: argparse.Namespace) -> None:
    """Run the verb `serve`, until it is interrupted."""
    serve(
        arguments.folder,
        host=arguments.host,
        port=arguments.port,
        key=arguments.key,
        device=arguments.device,
        dtype=arguments.dtype,
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        trust_run_code=arguments.trust_run_code,
    )
