"""Environments of their own for packages that the tests' one does not have."""

import subprocess
import venv
from pathlib import Path

import pytest


def python_with(folder: Path, *requirements: str) -> Path:
    """The Python of a new environment with these requirements; skips where they can't be fetched."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    # pip tries versions for minutes before it finds some that go together; uv for seconds.
    for install in (
        [str(python), "-m", "pip", "install", "-q", "uv"],
        [str(folder / "bin/uv"), "pip", "install", "-q", "--python", str(python), *requirements],
    ):
        done = subprocess.run(install, capture_output=True, text=True, timeout=900)
        if done.returncode:
            pytest.skip(f"the packages can't be installed: {done.stderr[-300:]}")
    return python
