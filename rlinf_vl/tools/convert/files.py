"""The settings in a file of another system, and in the files nearby that it names."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.convert import python, shell
from rlinf_vl.tools.convert.values import Unreadable, flat, load_yaml

#: OmegaConf resolvers in the interpolations of RLinf's configs.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "subtract": lambda a, b: a - b,
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "int_div": lambda a, b: a // b,
    "divide": lambda a, b: a / b,
    "not": lambda a: not a,
}


class Source(NamedTuple):
    """The settings of a file.

    Attributes:
        settings: dotted name → value.
        missing: names of configs that the file is based on and that were not found.
        unread: words of the script's command that are no settings.
    """

    settings: dict[str, Any]
    missing: list[str]
    unread: list[str]


def read_settings(path: Path) -> Source:
    """Return a file's settings, which override those of the files that it names.

    Raises:
        ConfigError: the file does not exist, can't be read, or has no settings.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config {str(path)!r}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r}: can't be read ({error})") from error
    try:
        source = Source({}, [], [])
        source.settings.update(_settings(text, path, source))
    except (
        yaml.YAMLError,
        OmegaConfBaseException,
        SyntaxError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(
            f"config {str(path)!r}: can't be read ({str(error).splitlines()[0]})"
        ) from error
    if not source.settings:
        formats = "YAML, a script with key=value or --key value, or Python with GRPOConfig(…)"
        raise ConfigError(f"config {str(path)!r}: no settings are in it; what is read is {formats}")
    source.missing[:] = dict.fromkeys(source.missing)
    return source


def near(path: Path, name: str) -> Path | None:
    """Return the file that a config names, relative to the config's folder or to one above it.

    Return None if there is no such file.
    """
    name = os.path.expanduser(name)
    # Scripts are started from the root of their repository, which is some folder above them.
    candidates = [folder / name for folder in [path.parent, *path.resolve().parents]]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _settings(text: str, path: Path, source: Source) -> dict[str, Any]:
    """Return the settings of a file by its suffix; append to `source` what is missing and unread."""
    match path.suffix:
        case ".yaml" | ".yml" | ".json":
            return _from_yaml(text, path, source)
        case ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            return python.settings(
                "\n".join("".join(cell["source"]) for cell in cells), lambda _: {}
            )
        case ".py":
            return python.settings(
                # TRL's examples have the command that starts them in their docstring.
                text,
                lambda docstring: _from_shell(docstring, path, source, first=True),
            )
    return _from_shell(text, path, source)


def _from_yaml(text: str, path: Path, source: Source) -> dict[str, Any]:
    """Return a YAML config's settings over those of its defaults list.

    A SkyPilot task has them in its script, `run`, and the script's variables in `envs`.
    """
    data = load_yaml(text)
    if not isinstance(data, dict):
        raise TypeError("no mapping of keys")
    if isinstance(script := data.get("run"), str):  # a SkyPilot task
        return _from_shell(
            script,
            path,
            source,
            {name: str(value) for name, value in (data.get("envs") or {}).items()},
        )
    merged_bases: Any = {}
    for entry in data.pop("defaults", None) or []:
        name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
        # Overrides of Hydra's own groups are mappings and set nothing of a run.
        if name in ("", "_self_"):
            continue
        if (base_file := near(path, f"{name}.yaml")) is None:
            source.missing.append(name)
        else:
            base = load_yaml(base_file.read_text(encoding="utf-8")) or {}
            base.pop("defaults", None)  # bases of bases are not followed
            # Hydra's name@a.b puts a config's keys below a.b.
            for part in reversed(package.split(".") if package else []):
                base = {part: base}
            merged_bases = OmegaConf.merge(merged_bases, base)
    data.pop("hydra", None)  # Hydra's own settings are none of a run
    return dict(flat(_resolved(OmegaConf.merge(merged_bases, data))))


def _from_shell(
    text: str,
    path: Path,
    source: Source,
    variables: dict[str, str] | None = None,
    first: bool = False,
) -> dict[str, Any]:
    """Return the settings of the command with the most settings, or of the `first` one with any.

    A script may prepare its data before the command that trains, which has more settings.
    """
    most_settings: dict[str, Any] = {}
    unread: list[str] = []
    trainer = ""
    for command in shell.commands(text, variables or {}):
        settings = command.settings
        # A script that calls another passes its settings on over those of the other.
        for name in command.scripts:
            if (script := near(path, name)) and script.resolve() != path.resolve():
                settings = (
                    _from_shell(script.read_text(encoding="utf-8"), script, source) | settings
                )
        if settings and (config := command.files.get("config") or command.files.get("config-name")):
            name = re.sub(r"(\.ya?ml)?$", ".yaml", config, count=1)
            folder = "" if "config" in command.files else command.files.get("config-path", "")
            if config_file := near(path, os.path.normpath(os.path.join(folder, name))) or near(
                path, name
            ):
                settings = (
                    _from_yaml(config_file.read_text(encoding="utf-8"), config_file, source)
                    | settings
                )
            else:
                source.missing.append(name)
        if len(settings) > len(most_settings):
            most_settings, unread, trainer = settings, command.unread, command.trainer
        if most_settings and first:
            break
    if trainer not in ("", "grpo"):
        raise ValueError(f"it starts TRL's {trainer}; only GRPO is converted. {python.OTHERS}")
    source.unread.extend(unread)
    return most_settings


def _resolved(config: Any) -> Any:
    """Return plain mappings and lists with every interpolation replaced by its value.

    A value that is not in the file is `Unreadable`. OmegaConf's resolvers are global, so only those
    that were missing are registered, and removed at the end.
    """
    added_names = [name for name in _RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in added_names:
        OmegaConf.register_new_resolver(name, _RESOLVERS[name])
    try:
        return _plain(config)
    finally:
        for name in added_names:
            OmegaConf.clear_resolver(name)


def _plain(node: Any) -> Any:
    """Return a node of OmegaConf as plain data, each leaf resolved on its own."""

    def resolved_child(key: Any) -> Any:
        try:
            return _plain(node[key])
        except OmegaConfBaseException:
            # A key that misses only its value is reported as such; the others are converted.
            raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[call-overload]
            return None if raw == MISSING else Unreadable(raw)

    if OmegaConf.is_dict(node):
        return {str(key): resolved_child(key) for key in node}
    return [resolved_child(i) for i in range(len(node))] if OmegaConf.is_list(node) else node
