"""The values of other systems, and their conversions into ours by the names that tables use."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from rlinf_vl.config.keys import config_keys

TRACKERS = ("tensorboard", "wandb", "trackio")
#: Trackers of other systems for what every run here has: metrics.jsonl, the progress line, the log.
_ALWAYS_LOGGED = ("console", "file", "none", "all")
#: Names of dtypes, and ours; None for "auto".
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "half": "fp16",
    "float": "fp32",
    "auto": None,
}


class Unreadable(str):
    """An expression whose value is not in the file."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-6 as a number; PyYAML, which follows YAML 1.1, reads a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def load_yaml(text: str) -> Any:
    """Return the data of a YAML text. Raises yaml.YAMLError: the text is no YAML."""
    return yaml.load(text, _Loader)  # noqa: S506 (a subclass of SafeLoader)


def typed(text: str) -> Any:
    """Return the value of a command line's word, as Hydra and OmegaConf read it."""
    if re.fullmatch(r"\$\{?\w+\}?", text):
        return Unreadable(text)  # a variable without a value
    if text == "None":
        return None
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def flat(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf of nested mappings."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(value: Any) -> str:
    """Return one spelling of a value such as True, which YAML and Python write differently."""
    return str(value).strip().lower()


def top_k(value: Any) -> int:
    """Return our top_k: 0 (all tokens) for -1 and for more tokens than any vocabulary has."""
    return 0 if value is None or float(value) <= 0 or float(value) >= 500_000 else int(value)


def names_of(value: Any) -> list[str]:
    """Return the names in a list, in a text with commas, or in a JSON list."""
    if value in (None, ""):
        return []
    if isinstance(value, str) and value.startswith("["):
        try:
            # Scripts write lists with either quotes, since the shell takes one kind away.
            value = json.loads(value.replace("'", '"'))
        except ValueError:
            value = value.strip("[]")
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [part for text in parts if (part := str(text).strip().strip("\"'"))]


def _paths(value: Any) -> list[str]:
    """Return the paths in a list or text, data sets of the hub as hf:// paths."""
    return [_path(text) for text in names_of(value)]


def _path(text: str) -> str:
    """Return hf://owner/name:split for EasyR1's and the hub's owner/name@split; a path as it is."""
    name, _, split = text.partition("@")
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".")
    if (
        is_hub_name
        and not name.endswith((".parquet", ".json", ".jsonl", ".csv", ".arrow"))
        and not os.path.exists(name)
    ):
        return f"hf://{name}{':' + split if split else ''}"
    return text


def _one_folder(value: Any) -> str:
    """Return the folder in a text with colons. Raises ValueError: the folders differ."""
    folders = dict.fromkeys(str(value).split(":"))
    if len(folders) > 1:
        raise ValueError(
            "images stand in one folder here: the nearest that holds all, data.image_root"
        )
    return str(value).partition(":")[0]


def _or(fallback: Any) -> Callable[[Any], Any]:
    """Return a conversion of counts: null, 0 and negative numbers become `fallback`."""
    return lambda value: fallback if value is None or float(value) <= 0 else int(value)


def _trackers(value: Any) -> list[str] | None:
    """Return our trackers among the names. Raises ValueError: all of them are foreign."""
    names = [name.lower() for name in names_of(value)]
    foreign_names = [name for name in names if name not in (*TRACKERS, *_ALWAYS_LOGGED)]
    if foreign_names and not set(names) & set(TRACKERS):
        raise ValueError(
            f"{', '.join(foreign_names)}: trackers are {', '.join(TRACKERS)}; one of your own is "
            "module:Class"
        )
    return [name for name in names if name in TRACKERS]


def _dtype(value: Any) -> str | None:
    """Return our name of a dtype, None for "auto"; an unknown one as it is."""
    text = plain(value).removeprefix("torch.")
    return _DTYPES.get(text, text)


def _name(value: Any) -> str:
    """Return a run's name that is a valid name of a folder."""
    text = re.sub(r"[^\w.+=-]+", "-", os.path.basename(str(value).rstrip("/"))).strip("-.")
    return text[:200] or "converted"


def _family(value: Any) -> str:
    """Return our model family for RLinf's name; "auto" if it is none of ours."""
    allowed = config_keys()["rollout.model.model_type"].allowed
    name = str(value).replace(".", "_").replace("-", "_")
    return name if isinstance(allowed, tuple) and name in allowed else "auto"


def _only_zero(value: Any) -> float | None:
    """Return 0.0. Raises ValueError: the coefficient of the router's loss is not 0."""
    if float(value or 0):
        raise ValueError("a loss for routers needs actor.model.freeze_router: false; set both")
    return 0.0


#: Name in a table → the conversion of their value into ours. It raises ValueError with the reason
#: for a value that is refused.
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
    "attention": lambda value: None if value is None else {"attention_backend": value},
    "or_all": _or(-1),
    "or_never": _or(-1),
    "or_none": _or(None),
    "whole": lambda value: max(1, round(float(value))),
    "only_zero": _only_zero,
}
