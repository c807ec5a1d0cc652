"""The use of RLinf's published configs without a conversion, where every key has a meaning here.

Configs of other systems are recognised and refused with the command that converts them.
"""

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
    """Return our settings for a YAML file of RLinf's, by dotted name.

    Return None for a file that is ours or can't be read.

    Args:
        path: the file.
        ours: returns the names of our configs; a file with one in its defaults list is ours, too.

    Raises:
        ConfigError: a key has no counterpart here, or the file is another system's.
    """
    system = _foreign_system(path, ours)
    if system is None:
        return None
    command = f"rlinf-vl convert-config {path} --output mine.yaml"
    if system != "rlinf":
        raise ConfigError(
            f"config {str(path)!r} is one of {SYSTEMS[system]}; convert it: {command}"
        )
    conversion = convert_file(path, system)
    unsupported = [*conversion.of("refused"), *conversion.of("unknown")]
    if problems := [
        f"{o.key}: {o.value!r} has no counterpart here: {o.text.strip()}" for o in unsupported
    ]:
        raise ConfigError(
            *problems, f"{path.name} is a config of RLinf; all of it but these is had by: {command}"
        )
    dropped = len(conversion.of("dropped"))
    log.info(
        "%s is a config of RLinf: %d of its keys need no counterpart here ('%s' lists them)",
        path.name,
        dropped,
        command,
    )
    return conversion.written


def _foreign_system(path: Path, ours: Callable[[], Iterable[str]]) -> str | None:
    """Return the system whose config a file is, None for ours.

    Such a file is based on none of our configs, and has three keys or more of that system which are
    not ours: fewer may be typing errors.
    """
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    if not isinstance(data, dict):
        return None
    bases = [base for base in data.get("defaults") or [] if isinstance(base, str)]
    if SCHEMA_NAME in bases:  # it is ours
        return None
    foreign_keys = [
        key
        for key, _ in flat(data)
        if key not in config_keys() and not key.startswith(("hydra.", "defaults"))
    ]
    system = system_of(foreign_keys) if len(foreign_keys) >= 3 else None
    names = {base.removesuffix(".yaml") for base in bases}
    our_names = (
        {*ours(), *(sibling.stem for sibling in path.parent.glob("*.yaml"))} if system else set()
    )
    return None if names & our_names else system
