#!/usr/bin/env bash
# What is checked apart from the tests, each a file of tests/checks/: type hints, the distribution, the documentation's site.
# Needs the environment that tests/run.sh makes. Arguments name some of them: bash tests/checks.sh type_hints
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
python="${RLINF_VL_PYTHON:-$root/.venv/bin/python}"
status=0
cd -- "$root"
for check in tests/checks/*.py; do
    name="$(basename -- "$check" .py)"
    if (($#)) && [[ " $* " != *" $name "* ]]; then continue; fi
    printf '%s: ' "$name"
    "$python" "$check" || { status=1; echo "$name: failed"; }
done
exit "$status"
