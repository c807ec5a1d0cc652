"""The form of OpenAI's chat requests and replies: parsing, checking, writing. No engine.

A request is refused with OpenAI's error object if it asks for what can't be done exactly, such as
another temperature than the run's. Nothing is ignored that would change what is sampled.
"""

import json
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.clips import is_clip
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.data.unusable import ImageError, shorten
from rlinf_vl.envs.call_forms import CallForm, Tools, count_unread
from rlinf_vl.extras.video.rows import to_clip_ref
from rlinf_vl.types import IMAGE_URL_PREFIX, ImageRef, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
#: Parameters that change nothing that is sampled.
_WITHOUT_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention parallel_tool_calls stream_options".split()
)
#: Parameters that are accepted with these values only, which mean nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
#: Fields of a message that are used, and those that change nothing that is sampled.
_MESSAGE_FIELDS = frozenset("role content name tool_calls tool_call_id reasoning_content".split())
_MESSAGE_WITHOUT_EFFECT = frozenset("id annotations cache_control provider_specific_fields".split())
#: Least temperature above 0. Logits that are divided by less overflow, and SGLang samples greedily
#: below 1e-6, so that its logprobs would not be those of the temperature.
MIN_TEMPERATURE = 1e-3
_KNOWN = frozenset(
    "model messages tools tool_choice stop max_tokens max_completion_tokens temperature top_p "
    "logprobs stream".split()
)


class ChatError(Exception):
    """A request that is refused.

    Attributes:
        status: the HTTP status.
        code: OpenAI's name of the error.
        param: the parameter at fault; None for none.
    """

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class ChatRequest:
    """A chat request that was checked.

    Attributes:
        messages: in the form of chat templates, images by `ImageRef.url`.
        keys: a text for each message, equal for messages that mean the same.
        images: the images by address, in order of appearance.
        new_images: those that were not known before, by the address under which they were sent.
        tools: OpenAI's descriptions of functions.
        parses_tools: whether calls of tools in the reply are returned as such.
        requires_call: whether the reply must begin with a call (`tool_choice`).
        required_tool: the name of the tool that it must call; "" for any.
        max_tokens: limit on the reply's tokens; None for the run's.
        stop: texts at which the reply ends.
        temperature, top_p: None for the run's.
        stream, with_usage: whether the reply is sent in pieces, the last one with the usage.
        logprobs: whether the reply has the tokens' logprobs.
        model: the name that the agent gave the policy.
    """

    messages: tuple[Message, ...]
    keys: tuple[str, ...]
    images: dict[str, ImageRef] = field(default_factory=dict)
    new_images: dict[str, ImageRef] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    parses_tools: bool = True
    requires_call: bool = False
    required_tool: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    with_usage: bool = False
    logprobs: bool = False
    model: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a reply; `arguments` is JSON, as the policy wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """A reply of the policy.

    Attributes:
        text: the text after the thoughts, without the calls of tools.
        thoughts: the text of the thoughts.
        finish_reason: stop, length or tool_calls.
        tokens: text, bytes and logprob of each sampled token; None for bytes that are not known.
        read_calls, unread_calls: the numbers of calls in it that could be read, and that could not.
    """

    id: str
    text: str
    thoughts: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[tuple[str, bytes | None, float], ...] = ()
    read_calls: int = 0
    unread_calls: int = 0

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message that the agent gets."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [_call_as_json(call) for call in self.tool_calls]
        return message

    @property
    def key(self) -> str:
        """The key of its message in a request that continues it."""
        return _key("assistant", self.text, [(c.id, c.name, c.arguments) for c in self.tool_calls])


def reply_of(
    reply_id: str,
    text: str,
    thoughts: str,
    finish_reason: str,
    usage: tuple[int, int],
    tokens: Sequence[tuple[str, bytes | None, float]],
    form: CallForm | None,
    tools: Tools = (),
) -> Reply:
    """Return a reply, with the calls of tools in its text.

    Calls that can't be read stay text.

    Args:
        usage: tokens of the prompt and of the reply.
        form: the form of calls; None if calls are text, too.
        tools: those that may be called.
    """
    calls: list[ToolCall] = []
    written = form.read(text, tools) if form is not None else []
    named = [call.named for call in written]
    unread_calls = 0 if form is None else count_unread(text, written)
    # All or none: a call that is left out would be sampled and neither run nor answered.
    if form is not None and named and None not in named:
        for number, (name, arguments) in enumerate(filter(None, named)):
            arguments_text = json.dumps(arguments, ensure_ascii=False)
            call_id = form.call_id(reply_id, number, name)
            calls.append(ToolCall(call_id, name, arguments_text))
        text = text[: written[0].start].rstrip()
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    prompt_tokens, completion_tokens = usage
    return Reply(
        reply_id,
        text,
        thoughts,
        tuple(calls),
        finish_reason,
        prompt_tokens,
        completion_tokens,
        tuple(tokens),
        sum(call is not None for call in named),
        unread_calls,
    )


# --- requests -------------------------------------------------------------------------------------


def parse_chat(body: Any, known_images: Mapping[str, ImageRef], video: VideoConfig) -> ChatRequest:
    """Check a chat request, and return it.

    Args:
        body: the decoded JSON.
        known_images: images by address: the problem's, which messages may name, and those that were
            sent before: agents send a conversation's in every call.
        video: data.video.

    Raises:
        ChatError: it is malformed, or asks for what is not supported.
    """
    if not isinstance(body, dict):
        raise ChatError("the request is no JSON object")
    # Clients write null for what they leave to the server.
    body = {name: value for name, value in body.items() if value is not None}
    for name, values in _NEUTRAL.items():
        if name in body and body[name] not in values:
            raise ChatError(f"{name}: {shorten(repr(body[name]))} is not supported", param=name)
    if unknown := sorted(body.keys() - _KNOWN - _WITHOUT_EFFECT - _NEUTRAL.keys()):
        raise ChatError(f"{unknown[0]}: this parameter is not supported", param=unknown[0])
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages: a list with at least one message is required", param="messages")
    images: dict[str, ImageRef] = {}
    new_images: dict[str, ImageRef] = {}
    all_images = ChainMap(new_images, dict(known_images))
    plain_messages, keys = [], []
    for number, message in enumerate(messages):
        try:
            plain, key = _plain_message(message, all_images, images, video)
        except (ImageError, ValueError) as error:
            raise ChatError(f"messages[{number}]: {error}", param="messages") from error
        plain_messages.append(plain)
        keys.append(key)
    # A reply that goes on with a text of the agent's own would be sampled from no turn of the policy.
    if plain_messages[-1]["role"] == "assistant":
        raise ChatError(
            "messages: the last one is the assistant's; the policy answers others", param="messages"
        )
    tools = _tools(body.get("tools", []))
    parses_tools, requires_call, required_tool = _tool_choice(
        body.get("tool_choice", "auto"), tools
    )
    stream_options = body.get("stream_options", {})
    limits = [
        _number(body, name, 1, None, integer=True)
        for name in ("max_tokens", "max_completion_tokens")
    ]
    # Older clients send the first of these names, newer ones the second.
    given_limits = [int(limit) for limit in limits if limit is not None]
    return ChatRequest(
        messages=tuple(plain_messages),
        keys=tuple(keys),
        images=images,
        new_images=new_images,
        tools=tools,
        parses_tools=parses_tools,
        requires_call=requires_call,
        required_tool=required_tool,
        max_tokens=min(given_limits, default=None),
        stop=_stop(body.get("stop", [])),
        temperature=_temperature(body),
        top_p=_number(body, "top_p", 0, 1),
        stream=_flag(body, "stream"),
        with_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        logprobs=_flag(body, "logprobs"),
        model=str(body.get("model", "")),
    )


def _number(
    body: Mapping[str, Any], name: str, low: float, high: float | None, integer: bool = False
) -> float | None:
    """Return a number of the request within its bounds; None if it is not there."""
    value = body.get(name)
    if value is None:
        return None
    kinds = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= low:
        raise ChatError(f"{name}: {shorten(repr(value))} must be at least {low}", param=name)
    if high is not None and not value <= high:
        raise ChatError(f"{name}: {value} must be at most {high}", param=name)
    return value


def _temperature(body: Mapping[str, Any]) -> float | None:
    temperature = _number(body, "temperature", 0, 2)
    if temperature and temperature < MIN_TEMPERATURE:
        raise ChatError(
            f"temperature: {temperature} must be 0, or at least {MIN_TEMPERATURE}",
            param="temperature",
        )
    return temperature


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ChatError(f"{name}: {shorten(repr(value))} must be true or false", param=name)
    return value


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise ChatError(f"stop: {shorten(repr(stop))} must be a text or texts", param="stop")
    return tuple(texts)


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(tools, list):
        raise ChatError("tools: a list is required", param="tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise ChatError(
                f'tools[{number}]: {shorten(repr(tool))} is no {{"type": "function", "function": '
                '{"name": …}}',
                param="tools",
            )
    return tuple(tools)


def _tool_choice(choice: Any, tools: Tools) -> tuple[bool, bool, str]:
    """Return whether calls are read, whether one is required, and of which tool."""
    if choice in ("auto", "none"):
        return bool(tools) and choice == "auto", False, ""
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and names:
        return True, True, ""
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if name in names:
            return True, True, name
    raise ChatError(
        f"tool_choice: {shorten(repr(choice))} is none of auto, none, required and the functions "
        f"{', '.join(names) or '(there are none)'}",
        param="tool_choice",
    )


def _plain_message(
    message: Any,
    known_images: MutableMapping[str, ImageRef],
    images: dict[str, ImageRef],
    video: VideoConfig,
) -> tuple[Message, str]:
    """Return a message in the form of chat templates, and its key; adds its images to `images`.

    Raises:
        ValueError, ImageError: it is malformed, or an image can't be used.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{shorten(repr(message))} has no role of {', '.join(ROLES)}")
    # Clients write null, "" or [] for what is not there.
    given_fields = {name for name, value in message.items() if value}
    if unknown := sorted(given_fields - _MESSAGE_FIELDS - _MESSAGE_WITHOUT_EFFECT):
        raise ValueError(
            f"{shorten(repr(unknown[0]))}: this field of a message is not supported; leave it out"
        )
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    plain: Message = {"role": role}
    if isinstance(content, str):
        plain["content"] = key_content = content
    elif isinstance(content, list):
        plain["content"] = [_plain_part(part, known_images, images, video) for part in content]
        # Some clients send a text as a list of one part.
        texts = [part["text"] for part in plain["content"] if part["type"] == "text"]
        key_content = texts[0] if len(texts) == len(content) == 1 else plain["content"]
    else:
        raise ValueError(f"the content {shorten(repr(content))} is neither a text nor a list")
    calls = []
    if tool_calls := message.get("tool_calls"):
        if not isinstance(tool_calls, list):
            raise ValueError(f"tool_calls: {shorten(repr(tool_calls))} is no list")
        calls = [_call_key(call) for call in tool_calls]
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}
            # Some templates show it, or refuse a call without one.
            | ({"id": call_id} if call_id else {})
            for call_id, name, arguments in calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise ValueError(f"{name}: {shorten(repr(message[name]))} is no text")
            plain[name] = message[name]
    # A reply was returned as one text, whatever parts the client makes of it.
    if role == "assistant" and isinstance(key_content, list):
        key_content = "".join(part.get("text", "") for part in key_content)
    return plain, _key(role, key_content, calls, plain.get("tool_call_id"), plain.get("name"))


def _plain_part(
    part: Any,
    known_images: MutableMapping[str, ImageRef],
    images: dict[str, ImageRef],
    video: VideoConfig,
) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image_url", "video_url"):
        raise ValueError(f"a part of type {kind!r}: text, image_url and video_url are supported")
    value = part.get(kind)
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise ValueError(f"the {kind} {shorten(repr(value))} has no url")
    if url in known_images:
        image = known_images[url]
    elif url.startswith(IMAGE_URL_PREFIX):
        raise ValueError(f"{shorten(url)} is no {kind.removesuffix('_url')} of the problem")
    elif url.startswith("data:") and kind == "video_url":
        image = known_images[url] = to_clip_ref(url, root=None, settings=video)
    elif url.startswith("data:"):
        image = known_images[url] = to_image_ref(url, root=None)
    else:
        raise ValueError(f"{shorten(url)} is no data URI; nothing is fetched")
    # By hash: an image that is sent in every call is one image.
    images[image.url] = image
    kind = "video_url" if is_clip(image) else "image_url"
    return {"type": kind, kind: {"url": image.url}}


def _call_key(call: Any) -> tuple[str, str, str]:
    """Return id, name and arguments of a call of a tool."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"the tool call {shorten(repr(call))} has no function with a name")
    arguments = function.get("arguments", "")
    # Some clients send the object that OpenAI writes as JSON: the text is that of our replies.
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # Its id may be missing: a tool that is called once needs none.
    return str(call.get("id") or ""), function["name"], arguments


def _arguments(arguments: str) -> Any:
    """Return arguments as a mapping, which chat templates write as JSON; a text that is none."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _key(
    role: str,
    content: Any,
    calls: Sequence[Sequence[str]] = (),
    call_id: str | None = None,
    name: str | None = None,
) -> str:
    # JSON, so that no text can pass for the border of two fields.
    return json.dumps([role, content, [list(call) for call in calls], call_id, name])


# --- replies --------------------------------------------------------------------------------------


def _call_as_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _logprobs(reply: Reply) -> dict[str, Any]:
    entries = []
    for text, token_bytes, logprob in reply.tokens:
        # A character may be spread over tokens: clients join the bytes, not the texts.
        byte_values = None if token_bytes is None else list(token_bytes)
        entries.append(
            {"token": text, "logprob": logprob, "bytes": byte_values, "top_logprobs": []}
        )
    return {"content": entries, "refusal": None}


def completion_json(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    """Return the body of a reply that is sent whole."""
    choice = {
        "index": 0,
        "message": reply.message,
        "finish_reason": reply.finish_reason,
        "logprobs": _logprobs(reply) if request.logprobs else None,
    }
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": _usage(reply),
    }


def chunks_json(request: ChatRequest, reply: Reply) -> Iterator[dict[str, Any]]:
    """Yield the bodies of a reply that is sent in pieces: role, text, calls, reason, usage."""
    head = {
        "id": reply.id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": request.model,
    }

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> dict:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason} | fields
        return head | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if reply.thoughts:
        yield chunk({"reasoning_content": reply.thoughts})
    # Word by word: clients join the pieces, whatever their size.
    for piece in reply.text.splitlines(keepends=True):
        yield chunk({"content": piece})
    if reply.tool_calls:
        calls = [_call_as_json(call) | {"index": i} for i, call in enumerate(reply.tool_calls)]
        yield chunk({"tool_calls": calls})
    fields = {"logprobs": _logprobs(reply)} if request.logprobs else {}
    yield chunk({}, reply.finish_reason, **fields)
    if request.with_usage:
        yield head | {"choices": [], "usage": _usage(reply)}
