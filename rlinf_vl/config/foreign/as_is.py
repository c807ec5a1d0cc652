"""A published config of RLinf's runs as it is, where all of it has a meaning here; one of another system is told apart."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from rlinf_vl.config.aliases import SYSTEMS, system_of
from rlinf_vl.config.foreign.convert import convert_file
from rlinf_vl.config.foreign.values import flat, load_yaml
from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.schema import SCHEMA_NAME
from rlinf_vl.errors import ConfigError

log = logging.getLogger(__name__)


def rlinf_settings(path: Path, ours: Callable[[], Iterable[str]]) -> dict[str, Any] | None:
    """Our settings for a YAML file of RLinf's, by dotted name; None for a file that is ours, or can't be read.

    Args:
        ours: the names of our configs, of which a file that has one in its defaults list is one, too.

    Raises:
        ConfigError: something in it can't be had here, or it is another system's.
    """
    system = _foreign_system(path, ours)
    if system is None:
        return None
    command = f"rlinf-vl convert-config {path} --output mine.yaml"
    if system != "rlinf":
        raise ConfigError(f"config {str(path)!r} is one of {SYSTEMS[system]}; convert it: {command}")
    made = convert_file(path, system)
    without = (*made.of("refused"), *made.of("unknown"))
    if problems := [f"{o.key}: {o.value!r} has no counterpart here: {o.text.strip()}" for o in without]:
        raise ConfigError(*problems, f"{path.name} is a config of RLinf; all of it but these is had by: {command}")
    dropped = len(made.of("dropped"))
    log.info(
        "%s is a config of RLinf: %d of its keys need no counterpart here ('%s' lists them)",
        path.name,
        dropped,
        command,
    )
    return made.written


def _foreign_system(path: Path, ours: Callable[[], Iterable[str]]) -> str | None:
    """The system whose config a file is: it is based on none of ours, and keys in it that are not ours are that system's."""
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    if not isinstance(data, dict):
        return None
    bases = [base for base in data.get("defaults") or [] if isinstance(base, str)]
    if SCHEMA_NAME in bases:  # it is ours
        return None
    other = [key for key, _ in flat(data) if key not in config_keys() and not key.startswith(("hydra.", "defaults"))]
    system = system_of(other) if len(other) >= 3 else None
    names = {base.removesuffix(".yaml") for base in bases}
    return None if system and names & {*ours(), *(one.stem for one in path.parent.glob("*.yaml"))} else system
