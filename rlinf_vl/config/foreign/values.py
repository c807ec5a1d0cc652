"""Values as other systems write them: YAML as OmegaConf reads it, words of a command line, and what a file doesn't say."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml


class Unreadable(str):
    """An expression whose value the file doesn't say."""


class _Loader(yaml.SafeLoader):
    """With 1e-6 as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def load_yaml(text: str) -> Any:
    """Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # noqa: S506


def typed(text: str) -> Any:
    """A word of a command line as Hydra and OmegaConf read it."""
    if re.fullmatch(r"\$\{?\w+\}?", text):
        return Unreadable(text)
    if text == "None":
        return None
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def flat(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name → value of nested mappings."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
