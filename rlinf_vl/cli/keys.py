"""Configs and keys as text: `rlinf-vl config [KEY]`, and what the help of `train` ends with."""

import textwrap

from omegaconf import MISSING

from rlinf_vl.config.keys import Key, config_keys, config_sections, suggestion
from rlinf_vl.config.load import examples, shown, type_name
from rlinf_vl.config.schema.limits import Limit, OrCode
from rlinf_vl.errors import ConfigError


def describe(asked: str | None) -> str:
    """All keys with their defaults; of a section, also what they mean; of one key, everything.

    Raises:
        ConfigError: nothing is called so.
    """
    keys, sections = config_keys(), config_sections()
    if asked is None:
        lines = [_line(name, key) for name, key in keys.items()]
        return "\n".join(
            [*lines, "", "'rlinf-vl config KEY' says what a key means, and takes sections and parts of names"]
        )
    if asked in keys:
        return _whole(asked, keys[asked])
    there = sections.get(asked) or tuple(name for name in keys if asked in name)
    if not there:
        raise ConfigError(f"{asked}: unknown key;{suggestion(asked)}")
    return "\n\n".join(_whole(name, keys[name]) for name in there)


def configs_and_keys() -> str:
    """The configs that come along, and every key by its section."""
    lines = ["configs (or the path of your own, which may begin with 'defaults: [toy-grpo-cpu]'):"]
    for name, path in examples().items():
        about = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"  {name:<32} {textwrap.shorten(about, 90, placeholder=' …')}")
    lines += ["", "keys ('rlinf-vl config KEY' says what one means, its default, and what it may be):"]
    for section, names in config_sections().items():
        own = [name.removeprefix(f"{section}.") for name in names if name.rpartition(".")[0] == section]
        if own:
            lines.append(textwrap.fill(" ".join(own), 118, initial_indent=f"  {section}: ", subsequent_indent="      "))
    return "\n".join(lines)


def _line(name: str, key: Key) -> str:
    return f"{name} = {'(must be given)' if key.default == MISSING else shown(key.default)}"


def _whole(name: str, key: Key) -> str:
    lines = [_line(name, key), *textwrap.wrap(key.doc, 110)]
    if isinstance(key.allowed, Limit):
        lines.append(f"It is {type_name(key.type)}, and must {key.allowed.must}.")
    elif key.allowed is not None:
        code = ("module:Name", "path/to/file.py:Name") if isinstance(key.allowed, OrCode) else ()
        lines.append(f"Allowed: {', '.join((*key.allowed, *code))}.")
    else:
        lines.append(f"It is {type_name(key.type)}.")
    return "\n    ".join(lines)
