"""Where SGLang is not installed, its engine's module still imports, and the engine says what to install."""

import subprocess
import sys

import pytest

CODE = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "sglang" else found(name, *rest)
from rlinf_vl.models.families import family_of
from rlinf_vl.rollout.sglang_engine import SglangEngine
assert not [m for m in sys.modules if m.split(".")[0] == "sglang"]
SglangEngine(
    "nowhere", family_of("qwen3_vl"), banned=None, pixels=None, context_length=8, max_running=1, deterministic=%s
)
"""


@pytest.mark.parametrize(
    "deterministic, error", [(False, "requirements/install.sh --sglang"), (True, "deterministic: true needs a GPU")]
)
def test_the_error_says_what_to_do(deterministic, error):
    done = subprocess.run([sys.executable, "-c", CODE % deterministic], capture_output=True, text=True)
    assert done.returncode and error in done.stderr.splitlines()[-1], done.stderr
