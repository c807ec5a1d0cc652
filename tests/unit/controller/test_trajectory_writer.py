"""The recorder's process."""

import subprocess
import sys


def test_it_starts_without_what_takes_seconds_to_import():
    slow = "{'torch', 'transformers', 'datasets'} & set(sys.modules)"
    command = f"import sys, rlinf_vl.controller.trajectory_writer; sys.exit(', '.join({slow}) or 0)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
