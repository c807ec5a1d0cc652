"""The parts that the parser of the command line is made of."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NoReturn

import rlinf_vl
from rlinf_vl.cli.completion import complete_config, complete_override
from rlinf_vl.config.load import examples
from rlinf_vl.errors import nearest

COMMAND = "rlinf-vl"
#: Python that comes with a checkpoint is executed with consent only.
TRUST_HELP = "run the Python that the checkpoint's run brings along in its config.yaml"


class MainParser(argparse.ArgumentParser):
    """The parser of verbs. Its error about an unknown verb suggests the nearest one, or `train`
    before the name of a config."""

    verbs: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        # argparse has no other sign of an unknown verb than its message.
        match = re.search(r"argument VERB: invalid choice: '(.*?)' \(choose", message)
        if match is None:
            super().error(message)
        name = match[1]
        # A user who forgets the verb begins with the config.
        is_config = name.removesuffix(".yaml") in examples() or name.endswith(".yaml")
        hint = (
            f" did you mean '{self.prog} train {name}'?" if is_config else nearest(name, self.verbs)
        )
        super().error(f"no verb {name!r};{hint} there are {', '.join(self.verbs)}")


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb's arguments.

    Attributes:
        epilog_text: makes the last part of the help. A function, as it takes time, and few ask for
            help.
    """

    epilog_text: Callable[[], str] | None = None

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.epilog_text()}\n" if self.epilog_text else "")


# argparse's own action takes a ready text, but reading the versions takes time.
class VersionAction(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        versions = {}
        for package in ("torch", "transformers", "ray", "sglang"):
            try:
                versions[package] = metadata.version(package)
            # SGLang is optional, and configs can be checked without the others.
            except metadata.PackageNotFoundError:
                versions[package] = "not installed"
        packages = ", ".join(f"{package} {version}" for package, version in versions.items())
        print(f"rlinf_vl {rlinf_vl.__version__} (Python {sys.version.split()[0]}, {packages})")
        parser.exit()


def add_config_and_overrides(
    argument: Any, nargs: str | None = None, config_help: str = "", override_help: str = ""
) -> None:
    """Add the arguments of a verb that takes a config; both texts are appended to their help."""
    config = argument(
        "config", nargs=nargs, help=f"name of a config, or path of a YAML file{config_help}"
    )
    # argcomplete reads the attribute `completer` of an argument.
    config.completer = complete_config
    text = (
        f"key=value, such as runner.max_steps=3; '{COMMAND} config' shows the keys{override_help}"
    )
    argument("overrides", nargs="*", help=text).completer = complete_override
