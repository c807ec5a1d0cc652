"""Configs and keys as text: `rlinf-vl config [KEY]`, and the last part of the help of `train`."""

import argparse
import textwrap

from omegaconf import MISSING

from rlinf_vl.config.keys import Key, config_keys, config_sections, suggestion
from rlinf_vl.config.load import EXAMPLES_DIR, examples, shown, type_name
from rlinf_vl.config.schema.limits import Limit, OrCode
from rlinf_vl.errors import ConfigError


def describe(query: str | None) -> str:
    """Return the description of the key, or of all keys of the section, that the query names.

    A query may also be a part of keys' names. None: all keys with their defaults.

    Raises:
        ConfigError: no key and no section has such a name.
    """
    keys, sections = config_keys(), config_sections()
    if query is None:
        lines = [_line(name, key) for name, key in keys.items()]
        return "\n".join(
            [
                *lines,
                "",
                "'rlinf-vl config KEY' says what a key means, and takes sections and parts of "
                "names",
            ]
        )
    # A whole name first: it may also be a part of longer ones.
    if query in keys:
        return _description(query, keys[query])
    # A section comes first: its name may also be a part of keys in other sections.
    matching_names = sections.get(query) or tuple(name for name in keys if query in name)
    if not matching_names:
        raise ConfigError(f"{query}: unknown key;{suggestion(query)}")
    return "\n\n".join(_description(name, keys[name]) for name in matching_names)


def configs_and_keys() -> str:
    """Return the list of the example configs, and of every key by its section."""
    lines = ["configs (or the path of your own, which may begin with 'defaults: [toy-grpo-cpu]'):"]
    for name, path in examples().items():
        # Those of recipes have a page of their own.
        if "recipes" in path.relative_to(EXAMPLES_DIR).parts:
            continue
        # The first line of an example says its subject.
        subject = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"  {name:<32} {textwrap.shorten(subject, 90, placeholder=' …')}")
    lines += [
        "  (and published results: docs/recipes.md)",
        "",
        "keys ('rlinf-vl config KEY' says what one means, its default, and what it may be):",
    ]
    for section, names in config_sections().items():
        # A section also lists the keys of the sections in it, which have lines of their own.
        key_names = [
            name.removeprefix(f"{section}.") for name in names if name.rpartition(".")[0] == section
        ]
        if key_names:
            text = " ".join(key_names)
            lines.append(
                textwrap.fill(
                    text, 118, initial_indent=f"  {section}: ", subsequent_indent="      "
                )
            )
    return "\n".join(lines)


def _line(name: str, key: Key) -> str:
    return f"{name} = {'(must be given)' if key.default == MISSING else shown(key.default)}"


def _description(name: str, key: Key) -> str:
    lines = [_line(name, key), *textwrap.wrap(key.doc, 110)]
    if isinstance(key.allowed, Limit):
        lines.append(f"It is {type_name(key.type)}, and must {key.allowed.must}.")
    elif key.allowed is not None:
        # Where a built-in name is accepted, code of the user may be, too.
        code = ("module:Name", "path/to/file.py:Name") if isinstance(key.allowed, OrCode) else ()
        lines.append(f"Allowed: {', '.join((*key.allowed, *code))}.")
    else:
        lines.append(f"It is {type_name(key.type)}.")
    return "\n    ".join(lines)


def main(arguments: argparse.Namespace) -> None:
    """Run the verb `config`: describe a key, a section or all."""
    print(describe(arguments.key))
