"""Reinforcement learning for vision-language models: a Ray-based distributed actor system."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_vl.api import Run, sft, train
    from rlinf_vl.policy import load_policy

__version__ = "0.1.0"
__all__ = ["Run", "load_policy", "sft", "train"]


def __getattr__(name: str) -> Any:
    """Return a public name, and import its module first: `import rlinf_vl` alone imports neither
    torch nor Ray, and takes no time."""
    if name not in __all__:
        raise AttributeError(f"module 'rlinf_vl' has no attribute {name!r}")
    if name == "load_policy":
        from rlinf_vl.policy import load_policy

        return load_policy
    from rlinf_vl import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
