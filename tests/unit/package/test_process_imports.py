"""What a process must not import at its start: the converters, and libraries that only one verb or one reward needs."""

import json
import subprocess
import sys

import pytest

#: Prints, after each statement, the modules of the converters and the slow libraries that are loaded.
PROGRAM = """
import json, sys
seen = []
for statement in json.loads(sys.argv[1]):
    exec(statement, {})
    seen.append(sorted(name for name in sys.modules if name.startswith(tuple(json.loads(sys.argv[2])))))
print(json.dumps(seen))
"""
#: Modules that no process of a run imports before it needs them.
NEVER = [
    "rlinf_vl.tools.convert",
    "bashlex",
    "math_verify",
    "sympy",
    "openai",
    "diskcache",
    "pebble",
]
#: What each process imports as it starts; the command line's comes first, as it loads a config.
PROCESSES = {
    "command line": [
        "import rlinf_vl",
        "from rlinf_vl.config import load_config; load_config('toy-grpo-cpu')",
        "import rlinf_vl.__main__, rlinf_vl.cli.parser, rlinf_vl.driver.entry",
    ],
    "controller and workers": [
        "import rlinf_vl.driver.supervise",
        "import rlinf_vl.rollout.pool.worker, rlinf_vl.actor.worker",
        "import rlinf_vl.rewards.scoring",
    ],
}


def loaded(statements, prefixes):
    """Return, after each statement, the loaded modules with these prefixes."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(statements), json.dumps(prefixes)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_neither_converters_nor_slow_libraries(process):
    statements = PROCESSES[process]
    for statement, modules in zip(statements, loaded(statements, NEVER), strict=True):
        assert not modules, f"{statement} imports {modules}"


def test_an_unknown_key_imports_the_tables_alone():
    statement = """
from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
try:
    load_config('toy-grpo-cpu', ['actor_rollout_ref.rollout.n=5'])
except ConfigError as error:
    assert 'algorithm.group_size' in str(error)
else:
    raise AssertionError('the key is accepted')
"""
    assert loaded([statement], ["rlinf_vl.tools.convert"]) == [
        ["rlinf_vl.tools.convert", "rlinf_vl.tools.convert.tables"]
    ]
