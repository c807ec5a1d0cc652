"""The arguments of the verbs that show and write configs and code."""

from pathlib import Path
from typing import Any

from rlinf_vl.cli.new import KINDS
from rlinf_vl.cli.parser_parts import COMMAND
from rlinf_vl.config.keys import config_keys, config_sections
from rlinf_vl.config.systems import SYSTEMS


def add_writing_verbs(verb: Any) -> None:
    """Add `config`, `convert-config`, `new` and `completion`.

    `verb`: makes a verb of a name and a summary; returns the method that adds an argument to it.
    """
    argument = verb(
        "config",
        "show configuration keys: all of them with their defaults, or what one means and may be",
    )
    argument(
        "key", nargs="?", metavar="KEY", help="a key, a section or a part of a key's name"
    ).completer = lambda **_: [*config_sections(), *config_keys()]

    argument = verb(
        "convert-config", f"write a config of {', '.join(SYSTEMS.values())} as one of ours"
    )
    argument(
        "file",
        type=Path,
        metavar="FILE",
        help="YAML, a script (key=value or --key value), Python or a notebook",
    )
    argument(
        "--from",
        dest="system",
        choices=SYSTEMS,
        help="the system that it is of; by default found by its keys",
    )
    argument(
        "--output",
        type=Path,
        metavar="YAML",
        help="the file to write; standard output unless named",
    )

    argument = verb(
        "new", "write a commented template of your own experiment, environment, agent or reward"
    )
    argument("kind", choices=KINDS, help="the kind of file")
    argument("name", metavar="NAME", help="its name, or the path of its file without ending")

    argument = verb(
        "completion",
        f"print what completes '{COMMAND}' in your shell; its first lines say how to use it",
    )
    argument(
        "shell",
        choices=("bash", "zsh", "fish"),
        nargs="?",
        default="bash",
        help="bash unless named",
    )
