"""One real SGLang engine for the whole folder, and one at a time for each further family: starting one takes a quarter of a
minute, and a gigabyte per process. One that no longer answers is replaced, so that its death is one test's failure."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang_toy import Toy, engine_of

from rlinf_vl.engines.sglang import messages
from rlinf_vl.engines.sglang.bans import BAN


def pytest_collection_modifyitems(items):
    # It ends the engine: the last to run.
    items.sort(key=lambda item: item.name.startswith("test_a_killed_scheduler"))
    if importlib.util.find_spec("sglang") is None:
        reason = "SGLang is not installed here; `bash requirements/install.sh --sglang --dev` makes an environment"
        for item in items:
            if "integration/sglang" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def live_engine(toy):
    """Returns an engine that answers: the one at hand, or a new one."""
    engines = []

    def get():
        if engines and not engines[-1].alive():
            # One that has ended says so; this one is silent.
            if engines[-1].host.end is None:
                print_stacks(engines[-1].host.processes.pids)
            engines.pop().close()
        if not engines:
            engines.append(engine_of(toy))
        return engines[-1]

    yield get
    for engine in engines:
        engine.close()


def print_stacks(pids: list[int]) -> None:
    """Print where the processes of an engine stand that does not answer."""
    py_spy = Path(sys.executable).with_name("py-spy")
    for pid in pids:
        done = subprocess.run(
            [py_spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60
        )
        print(f"stacks of process {pid} of an engine that does not answer:\n", done.stdout)
        print(done.stderr)


@pytest.fixture
def running(live_engine: Callable):
    """The engine. A test that changes its weights puts the toy's own back (fixture `engine`)."""
    return live_engine()


@pytest.fixture
def engine(running, toy):
    yield running
    if running.version and running.alive():
        running.load_weights([toy.weights()], version=0)


@pytest.fixture
def endless(running, toy, monkeypatch):
    """No sample ends before its length: an end id, at which SGLang stops whatever a request says, is banned as images' ids are."""
    banned = toy.banned.copy()
    banned[list(toy.processor.stop_ids)] = True
    monkeypatch.setattr(toy, "banned", banned)
    parameters = messages.parameters
    bias = dict.fromkeys(map(str, toy.processor.stop_ids), BAN)
    monkeypatch.setattr(
        messages, "parameters", lambda sampling: parameters(sampling) | {"logit_bias": bias}
    )
    yield
    if running.alive():
        running.resume()
