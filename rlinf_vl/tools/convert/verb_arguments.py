"""The arguments of the verb `convert-config`.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from pathlib import Path
from typing import Any

from rlinf_vl.config.systems import SYSTEMS


def convert_config(argument: Any) -> None:
    argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="YAML, a script (key=value or --key value), Python or a notebook",
    )
    argument(
        "--from",
        dest="system",
        choices=SYSTEMS,
        help="the system that it is of; by default found by its keys, and all for --explain",
    )
    argument(
        "--output",
        type=Path,
        metavar="YAML",
        help="the file to write; standard output unless named",
    )
    argument(
        "--explain",
        metavar="KEY",
        help="instead of converting a file, tell what becomes of a key or metric, "
        "or of all that end with it",
    )
