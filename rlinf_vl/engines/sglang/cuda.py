"""What an SGLang process on an NVIDIA GPU needs of the machine: libraries on the loader's path, and tools that compile.

Nothing here imports SGLang or touches a device, so that a machine can be looked at before anything is started.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

#: Major version of CUDA that SGLang's wheels, and the torch they ask for, are built with; nvcc must be of it.
CUDA_MAJOR = 13


def cuda_environment(shared_gpu: bool) -> dict[str, str]:
    """Environment variables of the engine's processes, to be set before they start.

    - `LD_LIBRARY_PATH`: with `shared_gpu` the scheduler starts under `LD_PRELOAD` of torch_memory_saver's library, which the
      loader resolves before Python can help: without libcudart on its path the process ends with code 127.
    - `PATH`: pip puts `ninja` beside the interpreter, and a Ray worker doesn't have that folder on its path.
    - `PYTORCH_CUDA_ALLOC_CONF`: torch_memory_saver refuses expandable segments.

    Args:
        shared_gpu: actor ranks use the same GPU, so the engine gives its memory back while they train.
    """
    environment = {"PATH": _first(str(Path(sys.executable).parent), os.environ.get("PATH", ""))}
    if folder := cudart_folder():
        environment["LD_LIBRARY_PATH"] = _first(str(folder), os.environ.get("LD_LIBRARY_PATH", ""))
    if shared_gpu:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if value := os.environ.get(name):
                environment[name] = re.sub(r"(expandable_segments\s*:\s*)true", r"\1False", value, flags=re.IGNORECASE)
    return environment


def cudart_folder() -> Path | None:
    """The folder of the CUDA runtime that torch has loaded into this process; None for a torch without CUDA."""
    import torch  # noqa: F401  # loads it

    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcudart.so."):
            return path.parent
    return None


def missing_tools() -> list[str]:
    """What SGLang's kernels, compiled on first use, lack on this machine: one message each, with the way out."""
    path = _first(str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    missing = []
    if shutil.which("ninja", path=path) is None:
        missing.append(
            f"ninja, with which SGLang compiles kernels on first use, is neither in {Path(sys.executable).parent} nor on PATH;"
            f" `{sys.executable} -m pip install ninja` puts it there"
        )
    compiler = os.environ.get("CXX") or "c++"  # perhaps with a launcher in front, as in "ccache g++"
    if shutil.which(compiler.split()[0], path=path) is None:
        missing.append(
            f"a C++ compiler, with which SGLang compiles kernels on first use: {compiler!r} is not on PATH; install one"
            " (Debian and Ubuntu: apt install g++), or name yours with CXX=/path/to/c++"
        )
    nvcc, version = _nvcc(path)
    way_out = (
        f"install the CUDA {CUDA_MAJOR} toolkit (the image in docker/Dockerfile.cuda has it) and name its folder with"
        " CUDA_HOME=/usr/local/cuda-13.0"
    )
    if version is None:
        missing.append(f"nvcc, with which SGLang compiles kernels on first use, is not at {nvcc}; {way_out}")
    elif version[0] != CUDA_MAJOR:
        missing.append(
            f"nvcc {version[0]}.{version[1]} at {nvcc}: SGLang's kernels want CUDA {CUDA_MAJOR}, as its torch was built with;"
            f" {way_out}"
        )
    return missing


def _nvcc(path: str) -> tuple[Path, tuple[int, int] | None]:
    """The nvcc that SGLang will run (CUDA_HOME or CUDA_PATH, then PATH, then /usr/local/cuda), and its version; None for
    the version where it can't be run."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc", path=path)
        home = Path(found).parent.parent if found else "/usr/local/cuda"
    nvcc = Path(home) / "bin" / "nvcc"
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return nvcc, None
    found = re.search(r"release (\d+)\.(\d+)", said)
    return nvcc, (int(found[1]), int(found[2])) if found else None


def _first(folder: str, path: str) -> str:
    """`path`, a list of folders, with `folder` in front."""
    return os.pathsep.join([folder, *(p for p in path.split(os.pathsep) if p and p != folder)])
