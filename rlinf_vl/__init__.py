"""Reinforcement learning for vision-language models: a Ray-based distributed actor system."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_vl.driver.api import Run, sft, train
    from rlinf_vl.driver.policy import load_policy

__version__ = "0.1.0"
__all__ = ["Run", "load_policy", "sft", "train"]

#: Modules that files of users name → their names since they moved. Both are one module.
MOVED = {
    "rlinf_vl.agents": "rlinf_vl.extras.agents",
    "rlinf_vl.envs.browser": "rlinf_vl.extras.browser.env",
    "rlinf_vl.envs.gymnasium": "rlinf_vl.extras.gymnasium",
    "rlinf_vl.envs.app_client": "rlinf_vl.extras.remote.client",
    "rlinf_vl.envs.openenv": "rlinf_vl.extras.openenv",
    "rlinf_vl.envs.remote": "rlinf_vl.extras.remote.env",
    "rlinf_vl.preflight": "rlinf_vl.tools.memory",
    "rlinf_vl.preflight.gpus": "rlinf_vl.runtime.gpus",
    "rlinf_vl.rollout.renderer": "rlinf_vl.rollout.episode.renderer",
    "rlinf_vl.smoke": "rlinf_vl.tools.check.smoke",
    "rlinf_vl.toy": "rlinf_vl.extras.toy",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules, and those in them, by the names that they had before they moved."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        name, inner = fullname, ""
        while name not in MOVED and "." in name:
            name, _, last = name.rpartition(".")
            inner = f".{last}{inner}"
        if name not in MOVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=MOVED[name] + inner)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = importlib.import_module(str(spec.origin))
        # The import system writes the old name's specification into the module; it is put back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state


# First: a package's own path would find its modules again, under both names.
sys.meta_path.insert(0, _MovedModules())


def __getattr__(name: str) -> Any:
    """Return a public name, and import its module first: `import rlinf_vl` alone imports neither
    torch nor Ray, and takes no time."""
    if name not in __all__:
        raise AttributeError(f"module 'rlinf_vl' has no attribute {name!r}")
    module = "policy" if name == "load_policy" else "api"
    return getattr(importlib.import_module(f"rlinf_vl.driver.{module}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
