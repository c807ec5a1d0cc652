"""A client of OpenAI's API that gets recorded replies, one after the other, and asks no network."""

import json

import httpx
from openai import AsyncOpenAI


def replayed_client(replies: list[str]) -> tuple[AsyncOpenAI, list[dict]]:
    """The client, and the list of the requests that it has made. A reply too many is an error 400."""
    left, requests = list(replies), []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(json.loads(request.content))
        if not left:
            return httpx.Response(400, json={"error": {"message": "the line was cut"}})
        message = {"role": "assistant", "content": left.pop(0)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
        return httpx.Response(200, json=head | {"choices": [choice]})

    http_client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    options = {"api_key": "none", "base_url": "http://replay/v1", "max_retries": 0}
    return AsyncOpenAI(**options, http_client=http_client), requests
