"""The settings that a file of another system says, and those of the files it names that stand near it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vl.config.foreign import python, shell
from rlinf_vl.config.foreign.values import Unreadable, flat, load_yaml
from rlinf_vl.errors import ConfigError

#: Arithmetic that configs of RLinf name in interpolations.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "subtract": lambda a, b: a - b,
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "int_div": lambda a, b: a // b,
    "divide": lambda a, b: a / b,
    "not": lambda a: not a,
}


class Source(NamedTuple):
    """Dotted name → value, and the configs that a file builds upon and that stand nowhere near it."""

    said: dict[str, Any]
    missing: list[str]


def read_settings(path: Path) -> Source:
    """What a file says, over what the files say that it names.

    Raises:
        ConfigError: there is no such file, or no settings are in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config {str(path)!r}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r}: can't be read ({error})") from error
    try:
        missing: list[str] = []
        said = _settings(text, path, missing)
    except (yaml.YAMLError, OmegaConfBaseException, SyntaxError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config {str(path)!r}: can't be read ({str(error).splitlines()[0]})") from error
    if not said:
        way_out = "YAML, a script with key=value or --key value, or Python with GRPOConfig(…)"
        raise ConfigError(f"config {str(path)!r}: no settings are in it; what is read is {way_out}")
    return Source(said, list(dict.fromkeys(missing)))


def near(path: Path, name: str) -> Path | None:
    """A file that a config names: relative to its folder, or to one above it."""
    name = os.path.expanduser(name)
    folders = (path.parent, *path.resolve().parents)
    return next((found for folder in folders if (found := folder / name).is_file()), None)


def _settings(text: str, path: Path, missing: list[str]) -> dict[str, Any]:
    match path.suffix:
        case ".yaml" | ".yml" | ".json":
            return _from_yaml(text, path, missing)
        case ".ipynb":
            cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
            return python.settings("\n".join("".join(cell["source"]) for cell in cells), lambda _: {})
        case ".py":
            return python.settings(text, lambda about: _from_shell(about, path, missing, first=True))
    return _from_shell(text, path, missing)


def _from_yaml(text: str, path: Path, missing: list[str]) -> dict[str, Any]:
    data = load_yaml(text)
    if not isinstance(data, dict):
        raise TypeError("no mapping of keys")
    if isinstance(script := data.get("run"), str):  # a SkyPilot task
        return _from_shell(
            script, path, missing, {name: str(value) for name, value in (data.get("envs") or {}).items()}
        )
    below: Any = {}
    for entry in data.pop("defaults", None) or []:
        name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
        if name in ("", "_self_"):
            continue
        if (found := near(path, f"{name}.yaml")) is None:
            missing.append(name)
        else:
            base = load_yaml(found.read_text(encoding="utf-8")) or {}
            base.pop("defaults", None)
            for part in reversed(package.split(".") if package else []):
                base = {part: base}
            below = OmegaConf.merge(below, base)
    data.pop("hydra", None)
    return dict(flat(_resolved(OmegaConf.merge(below, data))))


def _from_shell(
    text: str, path: Path, missing: list[str], variables: dict[str, str] | None = None, first: bool = False
) -> dict[str, Any]:
    """Of the command that says most, for a script may prepare data first; or of the first one that says anything."""
    most: dict[str, Any] = {}
    for command in shell.commands(text, variables or {}):
        said = command.said
        for name in command.scripts:
            if (script := near(path, name)) and script.resolve() != path.resolve():
                said = _from_shell(script.read_text(encoding="utf-8"), script, missing) | said
        if said and (config := command.files.get("config") or command.files.get("config-name")):
            name = re.sub(r"(\.ya?ml)?$", ".yaml", config, count=1)
            folder = "" if "config" in command.files else command.files.get("config-path", "")
            if found := near(path, os.path.normpath(os.path.join(folder, name))) or near(path, name):
                said = _from_yaml(found.read_text(encoding="utf-8"), found, missing) | said
            else:
                missing.append(name)
        most = said if len(said) > len(most) else most
        if most and first:
            break
    return most


def _resolved(config: Any) -> Any:
    """Plain mappings and lists, every interpolation by its value; `Unreadable` where the file has none."""
    added = [name for name in _RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in added:
        OmegaConf.register_new_resolver(name, _RESOLVERS[name])
    try:
        return _plain(config)
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


def _plain(node: Any) -> Any:
    def at(key: Any) -> Any:
        try:
            return _plain(node[key])
        except OmegaConfBaseException:
            raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[call-overload]
            return None if raw == MISSING else Unreadable(raw)

    if OmegaConf.is_dict(node):
        return {str(key): at(key) for key in node}
    return [at(i) for i in range(len(node))] if OmegaConf.is_list(node) else node
