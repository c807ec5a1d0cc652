"""Values as other systems write them, and what they are as ours: `CONVERSIONS`, by the names that tables use."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from rlinf_vl.config.keys import config_keys

TRACKERS = ("tensorboard", "wandb", "trackio")
#: Where they log besides, which every run here does: metrics.jsonl, the progress line, the log.
_ALWAYS_LOGGED = ("console", "file", "none", "all")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32", "auto": None}


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


def plain(value: Any) -> str:
    """One spelling of what YAML, Python and a command line write differently."""
    return str(value).strip().lower()


def top_k(value: Any) -> int:
    """-1, and more than any vocabulary has, is 0: all tokens."""
    return 0 if value is None or float(value) <= 0 or float(value) >= 500_000 else int(value)


def names_of(value: Any) -> list[str]:
    """A list of names from a list, from a text with commas, or from JSON."""
    if value in (None, ""):
        return []
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value.replace("'", '"'))
        except ValueError:
            value = value.strip("[]")
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [part for text in parts if (part := str(text).strip().strip("\"'"))]


def _paths(value: Any) -> list[str]:
    return [_path(text) for text in names_of(value)]


def _path(text: str) -> str:
    """EasyR1's and the hub's owner/name@split → hf://owner/name:split; a path as it is."""
    name, _, split = text.partition("@")
    plain = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".")
    if plain and not name.endswith((".parquet", ".json", ".jsonl", ".csv", ".arrow")) and not os.path.exists(name):
        return f"hf://{name}{':' + split if split else ''}"
    return text


def _one_folder(value: Any) -> str:
    folders = dict.fromkeys(str(value).split(":"))
    if len(folders) > 1:
        raise ValueError("images stand in one folder here: the nearest that holds all, data.image_root")
    return str(value).partition(":")[0]


def _or(otherwise: Any) -> Callable[[Any], Any]:
    """null, and numbers that mean it, is a value of ours."""
    return lambda value: otherwise if value is None or float(value) <= 0 else int(value)


def _trackers(value: Any) -> list[str] | None:
    names = [name.lower() for name in names_of(value)]
    other = [name for name in names if name not in (*TRACKERS, *_ALWAYS_LOGGED)]
    if other and not set(names) & set(TRACKERS):
        raise ValueError(f"{', '.join(other)}: trackers are {', '.join(TRACKERS)}; one of your own is module:Class")
    return [name for name in names if name in TRACKERS]


def _dtype(value: Any) -> str | None:
    text = plain(value).removeprefix("torch.")
    return _DTYPES.get(text, text)


def _name(value: Any) -> str:
    """A plain folder's name."""
    text = re.sub(r"[^\w.+=-]+", "-", os.path.basename(str(value).rstrip("/"))).strip("-.")
    return text[:200] or "converted"


def _family(value: Any) -> str:
    """RLinf's names of model families."""
    allowed = config_keys()["rollout.model.model_type"].allowed
    name = str(value).replace(".", "_").replace("-", "_")
    return name if isinstance(allowed, tuple) and name in allowed else "auto"


def _only_zero(value: Any) -> float | None:
    if float(value or 0):
        raise ValueError("a loss for routers needs actor.model.freeze_router: false; set both")
    return 0.0


#: Name in a table → their value as ours. Raises ValueError: refused, for the reason told.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "paths": _paths,
    "colons": lambda value: _paths(str(value).split(":")),
    "one_folder": _one_folder,
    "as_list": names_of,
    "model": lambda value: None if value is None else str(value),
    "name": _name,
    "dtype": _dtype,
    "family": _family,
    "trackers": _trackers,
    "top_k": top_k,
    "or_all": _or(-1),
    "or_never": _or(-1),
    "or_none": _or(None),
    "whole": lambda value: max(1, round(float(value))),
    "only_zero": _only_zero,
}
