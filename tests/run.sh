#!/usr/bin/env bash
# Makes the environment with the test tools and runs the tests. Arguments go to pytest: bash tests/run.sh tests/unit -k algo
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/requirements/install.sh" --dev

# One thread a process: the tests start several, and busy threads that outnumber the cores cost more than they give.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
cd -- "$root"
exec .venv/bin/python -m pytest "$@"
