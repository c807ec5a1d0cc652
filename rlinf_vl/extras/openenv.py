"""The environment `openenv:ADDRESS`: an OpenEnv server, played through OpenEnv's own client.

The server runs anywhere (a container, a Space, a process beside the run). Each episode has a
connection of its own, and with it a session of the server's.
"""

import asyncio
import base64
import binascii
import dataclasses
import json
import re
import typing
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import Template
from typing import Any

import numpy as np

from rlinf_vl.config.hubs import OPENENV
from rlinf_vl.envs.base import StepResult
from rlinf_vl.errors import pip_install
from rlinf_vl.types import Message, Problem
from rlinf_vl.user_code import CodeError, bypass_proxies, load_code

INSTALL = pip_install("rlinf_vl[openenv]")
#: The first characters of PNG, JPEG, GIF and WebP in base64.
_IMAGE_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
#: Fields of every observation, which are not shown: reward and end are no news to a policy.
_HIDDEN = ("done", "reward", "metadata")
_PROMPT = "Answer with one JSON object, of these fields: $action\n\n"
_INVALID = "That is no action: $problem."
#: Seconds to wait for the schema of a server's actions.
_SCHEMA_S = 10.0


class OpenEnv:
    """An episode on an OpenEnv server.

    The server's `reset` gets the group's seed, if it takes one. An observation's fields are shown
    as text and images, and a response is an action: a JSON object of its fields, also in a code
    block, or the text of its one field.

    Args:
        url: address of the server. `openenv:URL` has it already, a client class needs it.
        prompt: text before the first observation, such as how to answer. $action stands for the
            JSON schema of the action's fields, $task for the row's text. By default nothing where
            a response is the text of one field, or else the schema.
        action_field: the field that gets the whole response as text. By default the only field
            that the server requires, if a response is no JSON object.
        fields: the fields of an observation to show, in this order; a name with dots leads into a
            mapping (metadata.message). By default all but done, reward and metadata.
        image_fields: fields that hold pixels as nested lists, [height][width][3]. Images as data
            URIs, or as base64 of PNG, JPEG, GIF or WebP, are recognised.
        reset: keywords for the server's reset.
        reset_columns: columns of the row that are further keywords for it.
        invalid_message: reply to a response that is no action; $problem says why.
        reward_scale: factor of the environment's rewards.
        invalid_reward: reward of a response that is no action.
        max_episode_steps: number of responses, invalid ones included, after which an episode ends;
            None: no limit of its own.
        success_above: an episode counts as correct if the environment's rewards sum to more than
            this.
        client_kwargs: further keywords for the client, such as message_timeout_s.

    Raises:
        ImportError: the package is missing.
        ValueError: a keyword is invalid.
    """

    config_only = ("url", "client_kwargs")  # a row doesn't choose whom the run calls
    #: The part of `rollout.env_class` behind `openenv:`, if it is an address.
    address = ""
    #: The class of the client; None for OpenEnv's generic one.
    client_class: type | None = None

    def __init__(
        self,
        url: str = "",
        prompt: str | None = None,
        action_field: str = "",
        fields: Sequence[str] | None = None,
        image_fields: Sequence[str] = (),
        reset: Mapping[str, Any] | None = None,
        reset_columns: Sequence[str] = (),
        invalid_message: str = _INVALID,
        reward_scale: float = 1.0,
        invalid_reward: float = 0.0,
        max_episode_steps: int | None = None,
        success_above: float = 0.0,
        client_kwargs: Mapping[str, Any] | None = None,
        *,
        group_seed: int,
    ) -> None:
        self._url = url or self.address
        if not self._url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(
                f"url={self._url!r} is no address of a server; give rollout.env_kwargs.url, such "
                "as http://127.0.0.1:8000"
            )
        for name, value in (("fields", fields), ("image_fields", image_fields)):
            if isinstance(value, str):
                raise ValueError(f"{name}={value!r} must be a list of names")
        self._prompt = None if prompt is None else Template(prompt)
        self._invalid_message = Template(invalid_message)
        for name, template in (
            ("prompt", self._prompt),
            ("invalid_message", self._invalid_message),
        ):
            if template is not None and not template.is_valid():
                raise ValueError(f"{name}={template.template!r}: $$ is a $")
        self._make_client = _client_maker(self.client_class)
        self._client_kwargs = dict(client_kwargs or {})
        self._action_field = action_field
        self._fields, self._image_fields = fields, image_fields
        self._reset, self._reset_columns = dict(reset or {}), reset_columns
        self._reward_scale, self._invalid_reward = reward_scale, invalid_reward
        self._max_steps, self._success_above = max_episode_steps, success_above
        # Servers that draw with numpy's old generator refuse seeds of more than 31 bits.
        self._seed = group_seed % 2**31
        self._schema: dict[str, Any] = {}
        self._client: Any = None
        self._turns, self._invalid, self._total = 0, 0, 0.0

    async def start(self, problem: Problem) -> list[Message]:
        # The package's clients read proxies from the environment alone.
        bypass_proxies()
        self._client = self._make_client(base_url=self._url, **self._client_kwargs)
        columns = {name: problem.columns[name] for name in self._reset_columns}
        result = await self._client.reset(**{"seed": self._seed} | self._reset | columns)
        # In a thread: the event loop is that of all episodes.
        self._schema = await asyncio.to_thread(_action_schema, self._url)
        template = self._prompt
        if template is None:
            template = Template("" if self._action_field or self._only_field() else _PROMPT)
        properties = self._schema.get("properties", {})
        fields = {name: value for name, value in properties.items() if name != "metadata"}
        prompt = template.substitute(action=json.dumps(fields), task=_text_of(problem))
        parts = [{"type": "text", "text": prompt}] if prompt else []
        return [{"role": "user", "content": parts + self._shown(result.observation)}]

    async def step(self, response: str) -> StepResult:
        if self._client is None:
            raise RuntimeError("step() without start(), or after the end")
        self._turns += 1
        reward, done = self._invalid_reward, False
        try:
            result = await self._client.step(self._action(response))
        except _InvalidAction as error:
            self._invalid += 1
            text = self._invalid_message.safe_substitute(problem=error)
            parts = [{"type": "text", "text": text}]
        except RuntimeError as error:
            # The server refuses fields that its action doesn't have, which a policy may write.
            if "VALIDATION_ERROR" not in str(error):
                raise
            self._invalid += 1
            text = self._invalid_message.safe_substitute(problem="its fields are refused")
            parts = [{"type": "text", "text": text}]
        else:
            env_reward = float(result.reward or 0.0)
            self._total += env_reward
            reward, done = env_reward * self._reward_scale, bool(result.done)
            parts = [] if done else self._shown(result.observation)
        done = done or (self._max_steps is not None and self._turns >= self._max_steps)
        metrics = {
            "steps": self._turns - self._invalid,
            "invalid_answers": self._invalid,
            "episode_reward": self._total,
        }
        info = {"correct": self._total > self._success_above, "metrics": metrics}
        messages: list[Message] = [] if done else [{"role": "user", "content": parts}]
        return StepResult(messages, reward, done, info)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _action(self, response: str) -> Any:
        """Return the action that a response is. Raises _InvalidAction: it is none."""
        text = response.strip()
        fields: dict[str, Any]
        if self._action_field:
            fields = {self._action_field: text}
        elif isinstance(action := _json_object(text), dict):
            fields = action
        elif field := self._only_field():
            fields = {field: text}
        else:
            raise _InvalidAction("write one JSON object with the fields of the action")
        action_class = _action_class(type(self._client))
        if action_class is None:
            return fields
        try:
            return action_class(**fields)
        except (TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
            problem = str(error).splitlines()[0]
            raise _InvalidAction(problem) from error

    def _only_field(self) -> str | None:
        """Return the only field that an action must have; None if there are others, or none."""
        required = self._schema.get("required", [])
        return required[0] if len(required) == 1 else None

    def _shown(self, observation: Any) -> list[dict[str, Any]]:
        """Return an observation's fields as parts of a message."""
        values = _as_mapping(observation)
        names = self._fields
        if names is None:
            names = [name for name in values if name not in _HIDDEN]
        visible: list[tuple[str, Any, list[Any]]] = []
        for name in names:
            value = _at_path(values, name)
            # An empty field says nothing; 0 and false do.
            if value not in (None, "", [], {}):
                visible.append((name, value, self._images(name, value)))
        n_texts = sum(not images for _, _, images in visible)
        parts: list[dict[str, Any]] = []
        for name, value, images in visible:
            parts += [{"type": "image", "image": image} for image in images]
            if not images:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                # One text needs no name.
                text = text if n_texts == 1 else f"{name}: {text}\n"
                parts.append({"type": "text", "text": text})
        return parts or [{"type": "text", "text": "(nothing)"}]

    def _images(self, name: str, value: Any) -> list[Any]:
        """Return the images that a field holds: encoded bytes, or pixels."""
        if name in self._image_fields and not isinstance(value, str):
            return [np.asarray(value, np.uint8)]
        items = value if isinstance(value, list) else [value]
        images = [_encoded_image(item) for item in items if isinstance(item, str)]
        return [image for image in images if image is not None]


class _InvalidAction(Exception):
    """A response that is no action; the message says why."""


def openenv_class(address: str, files: Mapping[str, str]) -> type:
    """Return the environment class for `openenv:ADDRESS`.

    Args:
        address: URL of a server; or `module:Class` or path/to/file.py:Class, a subclass of
            OpenEnv's `EnvClient`.
        files: runner.code_files.

    Raises:
        CodeError: there is no such class.
    """
    if "://" in address:
        return _class_of(address, None)
    if not address:
        raise CodeError(f"{OPENENV}: write {OPENENV}http://host:port or {OPENENV}module:Class")
    methods = ("reset()", "step(action)", "close()")
    return _class_of("", load_code(address, {}, files, kind="OpenEnv client", signature=methods))


@lru_cache  # one class for one address: a row's class is compared with the config's
def _class_of(address: str, client_class: type | None) -> type:
    return type("OpenEnv", (OpenEnv,), {"address": address, "client_class": client_class})


def _client_maker(client_class: type | None) -> Callable[..., Any]:
    if client_class is not None:
        return client_class
    try:
        from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{error}; {INSTALL}") from error
    return GenericEnvClient


@lru_cache
def _action_class(client_class: type) -> Callable[..., Any] | None:
    """Return the class of a client's actions, `Act` of `EnvClient[Act, …]`; None for mappings."""
    for base in getattr(client_class, "__orig_bases__", ()):
        arguments = typing.get_args(base)
        if arguments and isinstance(arguments[0], type):
            return arguments[0]
    return None


def _action_schema(url: str) -> dict[str, Any]:
    """Return the JSON schema of a server's actions; {} if it tells none."""
    try:
        return _fetched_schema(re.sub("^ws", "http", url).rstrip("/"))
    except (OSError, ValueError, KeyError, TypeError):
        # Servers of older versions have no such page.
        return {}


@lru_cache  # an error is not cached: the server may have been starting
def _fetched_schema(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/schema", timeout=_SCHEMA_S) as reply:
        return dict(json.load(reply)["action"])


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a response is, or that its last code block holds; None without
    one."""
    blocks = re.findall(r"```(?:json)?\s*(.*?)```", text, flags=re.DOTALL)
    for candidate in (text, *blocks[-1:]):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None


def _as_mapping(observation: Any) -> dict[str, Any]:
    if isinstance(observation, Mapping):
        return dict(observation)
    if hasattr(observation, "model_dump"):
        return observation.model_dump(mode="json")
    if dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        return dataclasses.asdict(observation)
    return {"observation": observation}


def _at_path(values: Mapping[str, Any], name: str) -> Any:
    value: Any = values
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _encoded_image(text: str) -> bytes | None:
    """Return the bytes of an image in a data URI or in base64; None for any other text."""
    if text.startswith("data:image/"):
        text = text.partition(",")[2]
    elif not text.startswith(_IMAGE_STARTS):
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _text_of(problem: Problem) -> str:
    """Return the text of the row's last message."""
    content = problem.messages[-1]["content"] if problem.messages else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
