"""Completion of the command line in a shell (argcomplete)."""

import argparse
from collections.abc import Iterable
from typing import Any

from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.load import examples

#: Shell → the line that switches completion on, and the file to add it to.
INSTRUCTIONS = {
    "bash": 'eval "$(rlinf-vl completion bash)"   # add this line to ~/.bashrc',
    "zsh": 'eval "$(rlinf-vl completion zsh)"   # add this line to ~/.zshrc',
    "fish": "rlinf-vl completion fish | source   # add this line to ~/.config/fish/config.fish",
}


def script(shell: str) -> str:
    """Return the script that a shell sources."""
    # Imported in functions here: every verb imports this module, and few need argcomplete.
    from argcomplete.shell_integration import shellcode

    return f"# {INSTRUCTIONS[shell]}\n{shellcode(['rlinf-vl'], shell=shell)}"


def complete_config(prefix: str, **_: Any) -> Iterable[str]:
    """Return the names of configs, and the YAML files and folders that begin with the prefix."""
    from argcomplete.completers import FilesCompleter

    return [*examples(), *FilesCompleter(allowednames=("yaml",))(prefix)]


def complete_override(prefix: str, **_: Any) -> Iterable[str]:
    """Return the keys, each with its `=`; after the `=`, the values that the key allows."""
    key, equals, value = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in config_keys()]
    description = config_keys().get(key)
    if description is None:
        return []
    if description.type is bool:
        return [f"{key}=true", f"{key}=false"]
    if isinstance(description.allowed, tuple):
        return [f"{key}={choice}" for choice in description.allowed]
    # A text may be a file's path; lists of paths have other types, but names that say so.
    if description.type is str or "path" in key:
        from argcomplete.completers import FilesCompleter

        return [f"{key}={path}" for path in FilesCompleter()(value)]
    return []


def main(arguments: argparse.Namespace) -> None:
    """Run the verb `completion`: print the shell's script."""
    print(script(arguments.shell))
