"""Names on hubs: of models and data sets, and of environments that packages of their own play.

`verifiers:NAME` and `openenv:ADDRESS` are values of `rollout.env_class`. An environment of
`verifiers` has its own data set, whose rows are the source `verifiers://NAME` of `data.*_paths`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

#: A name of a model or a data set on the Hugging Face hub.
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
VERIFIERS = "verifiers:"
OPENENV = "openenv:"
#: Prefix of a source of rows, as of `hf://`.
VERIFIERS_ROWS = "verifiers://"
#: The agent that plays them, as `rollout.agent.function` would name it.
VERIFIERS_AGENT = "rlinf_vl.extras.verifiers.agent:solve"
#: `name`, or `owner/name` as the hub writes it.
_VERIFIERS_NAME = re.compile(r"[\w-]+(/[\w-]+)?")


def verifiers_name(env_class: str) -> str | None:
    """Return the name of the `verifiers` environment that a value of `rollout.env_class` names;
    None if it names another one."""
    return env_class.removeprefix(VERIFIERS) if env_class.startswith(VERIFIERS) else None


def rows_path(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the source of an environment's rows, `verifiers://NAME?ARGUMENTS`."""
    # In the path itself: whoever reads rows knows the paths, and nothing of `rollout`.
    query = f"?{quote(json.dumps(arguments, sort_keys=True))}" if arguments else ""
    return f"{VERIFIERS_ROWS}{name}{query}"


def parse_rows_path(path: str) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of `verifiers://NAME?ARGUMENTS`."""
    name, _, query = path.removeprefix(VERIFIERS_ROWS).partition("?")
    return name, json.loads(unquote(query)) if query else {}


def with_arguments(paths: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
    """Return paths in which every `verifiers://` entry has these arguments, and no others."""
    completed = []
    for path in paths:
        if path.startswith(VERIFIERS_ROWS):
            path = rows_path(path.partition("?")[0].removeprefix(VERIFIERS_ROWS), arguments)
        completed.append(path)
    return completed


def is_verifiers_name(name: str) -> bool:
    """Return whether a name may be that of a `verifiers` environment."""
    return _VERIFIERS_NAME.fullmatch(name) is not None
