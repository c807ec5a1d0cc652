"""An agent's command that plays each trajectory with one of the frameworks of examples/agents/frameworks, drawn by its seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "examples/agents/frameworks"


def main() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    seed = json.loads(Path(os.environ["RLINF_VL_TASK"]).read_text())["seed"]
    name = names[seed % len(names)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")], stdout=subprocess.PIPE, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result | {"metrics": {name: 1}}))


if __name__ == "__main__":
    main()
