"""The use of RLinf's published configs without a conversion, where every key has a meaning here.

Configs of other systems are recognised and refused with the command that converts them.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_vl.config.systems import SYSTEMS
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.convert.convert import convert_file
from rlinf_vl.tools.convert.tables import system_of

log = logging.getLogger(__name__)


def rlinf_settings(path: Path, unknown_keys: Sequence[str]) -> dict[str, Any] | None:
    """Return our settings for a YAML file of RLinf's, by dotted name.

    Return None for a file whose unknown keys are those of no system.

    Args:
        path: the file.
        unknown_keys: its keys that aren't ours.

    Raises:
        ConfigError: a key has no counterpart here, or the file is another system's.
    """
    system = system_of(unknown_keys)
    if system is None:
        return None
    command = f"rlinf-vl convert-config {path} --output mine.yaml"
    # Other systems have keys whose names mean something else here: only a conversion is safe.
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
