"""What a start on a GPU would meet, as far as a machine without one can see it."""

import os
import re
import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest

from rlinf_vl.rollout import sglang_cuda

pytestmark = pytest.mark.integration


def unresolved(library, environment):
    """Libraries that the loader does not find for `library` under these variables. Its cache, which holds a system's own
    CUDA, is left out: many machines have none."""
    (loader,) = {*Path("/lib64").glob("ld-linux-*.so.*")} or {*Path("/lib").glob("ld-linux-*.so.*")}
    environment = environment | {"LD_TRACE_LOADED_OBJECTS": "1"}  # list the libraries instead of running
    done = subprocess.run([loader, "--inhibit-cache", library], env=environment, capture_output=True, text=True)
    return set(re.findall(r"(\S+) => not found", done.stdout))


def test_the_memory_savers_library_resolves_under_our_environment_and_not_without_it(monkeypatch):
    """SGLang starts its scheduler under LD_PRELOAD of it; without libcudart on the loader's path that ends with code 127."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    name = f"torch_memory_saver_hook_mode_preload_cu{sglang_cuda.CUDA_MAJOR}.abi3.so"
    hook = next(file.locate() for file in files("torch_memory_saver") or () if file.name == name)
    driver, runtime = "libcuda.so.1", f"libcudart.so.{sglang_cuda.CUDA_MAJOR}"
    assert unresolved(hook, dict(os.environ)) - {driver} == {runtime}
    assert unresolved(hook, os.environ | sglang_cuda.cuda_environment(shared_gpu=True)) <= {driver}
