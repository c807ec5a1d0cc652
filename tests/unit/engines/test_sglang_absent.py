"""Where SGLang is missing or too old, its engine's module still imports, and the engine says what to install."""

import subprocess
import sys

import pytest

CODE = """
import sys
from importlib.metadata import Distribution, PackageNotFoundError
found = Distribution.from_name.__func__
def from_name(cls, name):
    if name != "sglang":
        return found(cls, name)
    if %r is None:
        raise PackageNotFoundError(name)
    return type("SGLang", (), {"version": %r})
Distribution.from_name = classmethod(from_name)
from rlinf_vl.models.families import family_of
from rlinf_vl.engines.sglang.engine import SglangEngine
from rlinf_vl.engines.sglang.settings import Settings
import numpy as np
assert not [m for m in sys.modules if m.split(".")[0] == "sglang"]
settings = Settings(model_path="nowhere", context_length=8, max_running=1, deterministic=%s)
SglangEngine(settings, family_of("qwen3_vl"), banned=np.zeros(8, bool), pixels=None)
"""


@pytest.mark.parametrize(
    "version, deterministic, error",
    [
        (None, False, "sglang is not installed here; run 'bash requirements/install.sh --sglang"),
        ("0.5.22", False, "sglang 0.5.22 is installed here, and 0.5.23 or newer is needed; run 'bash"),
        (None, True, "deterministic: true needs a GPU"),
    ],
)
def test_the_error_says_what_to_do(version, deterministic, error):
    code = CODE % (version, version, deterministic)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and error in done.stderr.splitlines()[-1], done.stderr
