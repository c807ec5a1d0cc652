"""What could come next on the command line, for the shell (argcomplete)."""

from collections.abc import Iterable
from typing import Any

from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.load import examples

HOW = {
    "bash": 'eval "$(rlinf-vl completion bash)"   # add this line to ~/.bashrc',
    "zsh": 'eval "$(rlinf-vl completion zsh)"   # add this line to ~/.zshrc',
    "fish": "rlinf-vl completion fish | source   # add this line to ~/.config/fish/config.fish",
}


def script(shell: str) -> str:
    """What a shell is to source."""
    from argcomplete.shell_integration import shellcode

    return f"# {HOW[shell]}\n{shellcode(['rlinf-vl'], shell=shell)}"


def complete_config(prefix: str, **_: Any) -> Iterable[str]:
    """Names of configs, and YAML files and folders that begin so."""
    from argcomplete.completers import FilesCompleter

    return [*examples(), *FilesCompleter(allowednames=("yaml",))(prefix)]


def complete_override(prefix: str, **_: Any) -> Iterable[str]:
    """Keys, each with its `=`; behind that, what the key allows."""
    key, equals, value = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in config_keys()]
    known = config_keys().get(key)
    if known is None:
        return []
    if known.type is bool:
        return [f"{key}=true", f"{key}=false"]
    if isinstance(known.allowed, tuple):
        return [f"{key}={choice}" for choice in known.allowed]
    if known.type is str or "path" in key:
        from argcomplete.completers import FilesCompleter

        return [f"{key}={path}" for path in FilesCompleter()(value)]
    return []
