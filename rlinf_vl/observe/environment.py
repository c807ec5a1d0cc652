"""What a run ran on and from: `environment.json` in its folder."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

#: Packages whose versions matter to a result.
PACKAGES = ("rlinf_vl", "torch", "transformers", "ray", "sglang", "numpy", "datasets", "math-verify", "tokenizers")


def write_environment(run_dir: Path) -> None:
    """Write `run_dir/environment.json`: command, machine, versions, and the state of the checkout that is run."""
    (run_dir / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")


def environment() -> dict[str, Any]:
    """What a run runs on, by name: command, host, hardware, versions, commit; values as JSON takes them."""
    gpus = _gpus()
    return {
        "command": " ".join(sys.orig_argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": _git(Path(__file__).parent),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Names of this host's GPUs, by the driver's own tool: torch would take memory of a GPU for as long as this process lives."""
    try:
        return subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _git(folder: Path) -> dict[str, Any] | None:
    """The checkout that `folder` is in; None where it is in none."""

    def ask(*question: str) -> str:
        return subprocess.run(["git", *question], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        tracked = ask("ls-files", "__init__.py", "../__init__.py")
        if not tracked:
            return None  # installed into an environment that happens to be inside some checkout
        changed = ask("status", "--porcelain", "--untracked-files=no").splitlines()
        return {
            "commit": ask("rev-parse", "HEAD"),
            "branch": ask("rev-parse", "--abbrev-ref", "HEAD"),
            "changed_files": len(changed),
        }
    except (OSError, subprocess.CalledProcessError):
        return None
