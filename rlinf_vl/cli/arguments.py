"""The arguments of the core's verbs: a function for each, named as its verb.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from typing import Any

from rlinf_vl.cli.new import KINDS
from rlinf_vl.cli.parser_parts import add_config_and_overrides
from rlinf_vl.config.keys import config_keys, config_sections
from rlinf_vl.config.toys import TOYS


def train(argument: Any) -> None:
    add_config_and_overrides(argument)
    argument(
        "--check",
        action="store_true",
        help="don't train, only check config, data, model and folders",
    )
    argument(
        "-m",
        "--multirun",
        action="store_true",
        help="run each combination of the values that overrides list, such as runner.seed=1,2",
    )
    argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="for --multirun: runs at a time (default 1)",
    )


def sft(argument: Any) -> None:
    add_config_and_overrides(argument)
    argument(
        "--check",
        action="store_true",
        help="don't train, only check config, data, model and folders",
    )


def toy(argument: Any) -> None:
    argument("name", nargs="?", choices=TOYS, default="toy", help="the task; toy unless named")
    argument(
        "--seed",
        type=int,
        default=None,
        help="seed of the checkpoint (default: that of the configs)",
    )


def config(argument: Any) -> None:
    argument(
        "key", nargs="?", metavar="KEY", help="a key, a section or a part of a key's name"
    ).completer = lambda **_: [*config_sections(), *config_keys()]


def new(argument: Any) -> None:
    argument("kind", choices=KINDS, help="the kind of file")
    argument("name", metavar="NAME", help="its name, or the path of its file without ending")


def completion(argument: Any) -> None:
    argument(
        "shell",
        choices=("bash", "zsh", "fish"),
        nargs="?",
        default="bash",
        help="bash unless named",
    )
