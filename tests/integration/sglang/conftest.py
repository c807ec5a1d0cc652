"""One real SGLang engine for the whole folder, and one at a time for each further family: starting one takes a quarter of a
minute, and a gigabyte per process."""

import importlib.util

import numpy as np
import pytest
from sglang_toy import Toy, engine_of

from rlinf_vl.engines.sglang.messages import BAN


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
def running(toy):
    """The engine. A test that changes its weights puts the toy's own back (fixture `engine`)."""
    engine = engine_of(toy)
    yield engine
    engine.close()


@pytest.fixture
def engine(running, toy):
    yield running
    if running.version and running.host.end is None:
        running.load_weights([toy.weights()], version=0)


@pytest.fixture
def endless(running, toy, monkeypatch):
    """No sample ends before its length: an end id, at which SGLang stops whatever a request says, is banned as images' ids are."""
    banned = toy.banned.copy()
    banned[list(toy.processor.stop_ids)] = True
    monkeypatch.setattr(toy, "banned", banned)
    bans = dict.fromkeys(map(str, np.flatnonzero(banned).tolist()), BAN)
    monkeypatch.setattr(running.requests, "bans", bans)
    yield
    if running.host.end is None:
        running.resume()
