"""Resolve SGLang's server arguments as on a node of H100s, on a machine without one.

Reads {name: [arguments, environment]} as JSON, and writes {name: [resolved arguments, environment], or the error}.
What asks for the device gets constants; the kernels' wheel, which loads under a CUDA driver only, is a stand-in that has
every name. All else is SGLang's own: its model overrides, its checks, and the variables it sets for its processes.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from unittest.mock import MagicMock

import torch

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=81559 * 2**20,
    multi_processor_count=132,
)
ANSWERS = {
    "is_available": True,
    "device_count": 8,
    "current_device": 0,
    "get_device_name": PROPERTIES.name,
    "get_device_capability": (9, 0),
    "get_device_properties": PROPERTIES,
    "mem_get_info": (PROPERTIES.total_memory, PROPERTIES.total_memory),
    "synchronize": None,
    "empty_cache": None,
}


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and whatever is imported from it."""

    def find_spec(self, fullname, path, target=None):
        if fullname.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock()
        module.__spec__, module.__path__ = spec, []
        return module

    def exec_module(self, module):
        pass


def resolve(arguments, environment):
    """In a process of its own: SGLang writes to the environment, and resolves a record once."""
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import PortArgs, ServerArgs

    os.environ.update(environment)
    server = ServerArgs(**arguments)
    server.resolve_once()
    server.check_server_args()
    _set_envs_and_config(server)
    return server.resolved_dict() | {"ports": vars(PortArgs.init_new(server))}, dict(os.environ)


def main():
    """Fork for each case once everything is imported, which takes most of the time."""
    cases = json.load(sys.stdin)
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    sys.meta_path.insert(0, Kernels())
    import sglang.srt.entrypoints.engine  # noqa: F401

    results = {}
    for name, case in cases.items():
        receiver, sender = os.pipe()
        if os.fork() == 0:
            try:
                answer = json.dumps(resolve(*case), default=str)
            except Exception as error:
                answer = json.dumps(f"{type(error).__name__}: {error}")
            with os.fdopen(sender, "w") as out:
                out.write(answer)
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as answer:
            results[name] = json.load(answer)
        os.wait()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
