"""Type hints hold, at the level that pyproject.toml sets ([tool.pyright])."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> str | None:
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return done.stderr
    report = json.loads(done.stdout)
    errors = [
        f"{each['file']}:{each['range']['start']['line'] + 1}: {each['message']} ({each.get('rule', 'syntax')})"
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    analyzed, files = (
        report["summary"]["filesAnalyzed"],
        len(list((ROOT / "rlinf_vl").rglob("*.py"))),
    )
    if analyzed < files:
        errors.append(f"{analyzed} files were analyzed, but rlinf_vl has {files}")
    if not errors:
        print(f"{analyzed} files have no error")
    return "\n".join(errors) or None


if __name__ == "__main__":
    sys.exit(main())
