"""Type hints hold, at the level that pyproject.toml sets ([tool.pyright])."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not importlib.util.find_spec("basedpyright"), reason="basedpyright is not installed (--dev)")
@pytest.mark.skipif(bool(importlib.util.find_spec("sglang")), reason="checked in the environment without SGLang")
def test_type_hints_hold():
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    found = [
        f"{each['file']}:{each['range']['start']['line'] + 1}: {each['message']} ({each.get('rule', 'syntax')})"
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert not found, "\n".join(found)
    assert report["summary"]["filesAnalyzed"] >= len(list((ROOT / "rlinf_vl").rglob("*.py")))
