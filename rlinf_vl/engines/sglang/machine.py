"""Checks of this machine for SGLang: its version, tools that compile its kernels, libraries on the
loader's path.

Nothing here imports SGLang, and only `cudart_folder` imports torch, so that a machine can be
checked before anything is started.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from packaging.version import Version

#: The oldest version accepted, and the one that the tests run with (`doctor` warns of a newer one).
#: Before it, a GPU engine launches a kernel per banned id and request, and engines that start at
#: once race for ports.
OLDEST = "0.5.23"
#: Major version of CUDA that SGLang's wheels, and the torch they ask for, are built with; nvcc must
#: be of it.
CUDA_MAJOR = 13
#: The entry point (pyproject.toml) through which SGLang finds `cpu.py`.
PLATFORM_GROUP = "sglang.srt.platforms"
PLATFORM = "rlinf_vl_cpu"


def require_sglang() -> None:
    """Raise ImportError, with a remedy, if SGLang is not installed or too old."""
    remedy = (
        f"run 'bash requirements/install.sh --sglang {OLDEST}' and use its environment "
        "(.venv-sglang), or set rollout.rollout_backend=torch"
    )
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        raise ImportError(
            f"rollout.rollout_backend: sglang is not installed here; {remedy}"
        ) from None
    if Version(installed) < Version(OLDEST):
        raise ImportError(
            f"rollout.rollout_backend: sglang {installed} is installed here, and {OLDEST} or newer "
            f"is needed; {remedy}"
        )


def require_platform() -> None:
    """Raise RuntimeError if SGLang will not find our CPU platform."""
    if not any(e.name == PLATFORM for e in entry_points(group=PLATFORM_GROUP)):
        raise RuntimeError(
            f"SGLang on the CPU needs the entry point {PLATFORM!r} of {PLATFORM_GROUP}, which an "
            "older installation of rlinf_vl lacks; `bash requirements/install.sh --sglang` "
            "registers it"
        )


def cuda_environment(shared_gpu: bool, keeps_copy: bool = False) -> dict[str, str]:
    """Return environment variables for the engine's processes on a GPU, to be set before they
    start.

    - `LD_LIBRARY_PATH`: with `shared_gpu` the scheduler starts under `LD_PRELOAD` of
      torch_memory_saver's library, which the loader resolves before Python can help: without
      libcudart on its path the process ends with code 127.
    - `PATH`: pip puts `ninja` beside the interpreter, and a Ray worker doesn't have that folder on
      its path.
    - `PYTORCH_CUDA_ALLOC_CONF`: torch_memory_saver refuses expandable segments.
    - `TMS_RETAIN_CPU_BACKUP`: without it torch_memory_saver frees its page-locked copy of the weights when they wake, and locks as
      much memory again when they next sleep, which takes longer than the copy.

    Args:
        shared_gpu: actor ranks use the same GPU, so the engine releases its memory while they
            train.
        keeps_copy: with a copy of its weights on the host.
    """
    environment = {"PATH": _path()}
    if folder := cudart_folder():
        environment["LD_LIBRARY_PATH"] = _prepend(
            str(folder), os.environ.get("LD_LIBRARY_PATH", "")
        )
    if shared_gpu:
        if keeps_copy:
            environment["TMS_RETAIN_CPU_BACKUP"] = os.environ.get("TMS_RETAIN_CPU_BACKUP", "1")
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if value := os.environ.get(name):
                environment[name] = re.sub(
                    r"(expandable_segments\s*:\s*)true", r"\1False", value, flags=re.IGNORECASE
                )
    return environment


def cudart_folder() -> Path | None:
    """Return the folder of the CUDA runtime that torch has loaded into this process; None for a
    torch without CUDA."""
    import torch  # noqa: F401  # loads it

    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcudart.so."):
            return path.parent
    return None


def missing_tools() -> list[str]:
    """Return a message, with a remedy, for each tool missing here that compiles SGLang's kernels on
    first use."""
    missing = []
    if shutil.which("ninja", path=_path()) is None:
        missing.append(
            "ninja, with which SGLang compiles kernels on first use, is neither in "
            f"{Path(sys.executable).parent} nor on PATH; `{sys.executable} -m pip install ninja` "
            "puts it there"
        )
    compiler = os.environ.get("CXX") or "c++"  # may have a launcher in front, as in "ccache g++"
    if shutil.which(compiler.split()[0], path=_path()) is None:
        missing.append(
            f"a C++ compiler, with which SGLang compiles kernels on first use: {compiler!r} is not "
            "on PATH; install one (Debian and Ubuntu: apt install g++), or name yours with "
            "CXX=/path/to/c++"
        )
    nvcc, release = _nvcc()
    remedy = (
        f"install the CUDA {CUDA_MAJOR} toolkit (the image in docker/Dockerfile.cuda has it) and "
        "name its folder with CUDA_HOME=/usr/local/cuda-13.0"
    )
    if release is None:
        missing.append(
            f"nvcc, with which SGLang compiles kernels on first use, is not at {nvcc}; {remedy}"
        )
    elif int(release.split(".")[0]) != CUDA_MAJOR:
        missing.append(
            f"nvcc {release} at {nvcc}: SGLang's kernels want CUDA {CUDA_MAJOR}, as its torch was "
            f"built with; {remedy}"
        )
    return missing


def _nvcc() -> tuple[Path, str | None]:
    """Return the nvcc that SGLang will run and its release, such as "13.0", or None if it can't be
    run.

    SGLang looks in CUDA_HOME or CUDA_PATH, then on PATH, then in /usr/local/cuda.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        on_path = shutil.which("nvcc", path=_path())
        home = Path(on_path).parent.parent if on_path else "/usr/local/cuda"
    nvcc = Path(home) / "bin" / "nvcc"
    try:
        version_text = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return nvcc, None
    release = re.search(r"release (\d+\.\d+)", version_text)
    return nvcc, release[1] if release else None


def _path() -> str:
    """Return PATH for the engine's processes."""
    return _prepend(str(Path(sys.executable).parent), os.environ.get("PATH", ""))


def _prepend(folder: str, path: str) -> str:
    """Return `path`, a list of folders, with `folder` moved or added to its front."""
    return os.pathsep.join([folder, *(p for p in path.split(os.pathsep) if p and p != folder)])
