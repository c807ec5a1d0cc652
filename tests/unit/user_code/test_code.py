"""From a name to code from outside: files, those beside them and notebooks as texts; what is refused without running it."""

import importlib
import subprocess
import sys
import urllib.request

import httpx
import pytest
import yaml

from rlinf_vl.config import changed_keys, load_config, save_config
from rlinf_vl.envs.single_turn import SingleTurn
from rlinf_vl.models.families import family_of
from rlinf_vl.models.family import Family
from rlinf_vl.observe.tracker import make_trackers
from rlinf_vl.user_code import (
    CodeError,
    bypass_proxies,
    check_code,
    collect_code,
    load_code,
    pickled,
)

REWARD = {
    "kind": "reward",
    "signature": "score(response, answer, **row) or score(completions, **columns)",
}
LOSS = {"kind": "loss", "signature": "loss(logprobs, advantages, *, clip)"}
TRACKER = {"kind": "tracker", "signature": "open_tracker(run)"}
CLASS = {"kind": "environment", "signature": ("start(problem)", "close()")}


def test_a_file_travels_with_the_modules_beside_it_and_no_others(tmp_path, monkeypatch):
    for name, text in {
        "score.py": "import json\nimport numpy\nfrom words import count\nfrom kit.tools import TWO\n"
        "def score(response, answer, **row): return count(response) * TWO + later()\n"
        "def later():\n    import lazily\n    return lazily.HUNDRED\n",
        "words.py": "def count(text): return len(text.split())\n",
        "kit/__init__.py": "",
        "kit/tools.py": "from . import numbers\nTWO = numbers.TWO\n",
        "kit/numbers.py": "TWO = 2\n",
        "lazily.py": "HUNDRED = 100\n",
        "unused.py": "1 / 0\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    files = {}
    name = collect_code("score.py:score", ["/nowhere", str(tmp_path)], files)
    assert name == f"{tmp_path}/score.py:score"
    beside = {
        "score.py",
        "words.py",
        "lazily.py",
        "kit/__init__.py",
        "kit/tools.py",
        "kit/numbers.py",
    }
    assert files.keys() == {f"{tmp_path}/{path}" for path in beside}
    for path in beside:
        (tmp_path / path).unlink()
    assert load_code(name, {}, files, **REWARD)("one two three", "") == 106
    assert load_code("score.py:score", {}, files, **REWARD) is load_code(name, {}, files, **REWARD)
    changed = files | {f"{tmp_path}/words.py": "def count(text): return 0\n"}
    assert load_code(name, {}, changed, **REWARD)("one two three", "") == 100


def test_of_two_files_of_one_name_each_entry_loads_its_own(tmp_path, monkeypatch):
    """And a name that both could be is refused, as is a module that a late import could confuse."""
    for place, value in (("rewards/", 1), ("", 2)):
        (tmp_path / place).mkdir(exist_ok=True)
        text = f"import worth\ndef score(response, answer, **row): return worth.V + {value}\n"
        (tmp_path / f"{place}score.py").write_text(text)
        (tmp_path / f"{place}worth.py").write_text(f"V = {value}0\n")
    monkeypatch.chdir(tmp_path)
    for order in (["rewards/score.py", "score.py"], ["score.py", "rewards/score.py"]):
        files = {}
        names = [collect_code(f"{path}:score", [".", "/nowhere"], files) for path in order]
        assert names == [f"{tmp_path}/{path}:score" for path in order]
        loaded = [load_code(name, {}, files, **REWARD) for name in names]
        expected = [11.0 if path.startswith("rewards") else 22.0 for path in order]
        assert [function("", "") for function in loaded] == expected
        assert load_code("score.py:score", {}, files, **REWARD) is loaded[order.index("score.py")]
    monkeypatch.chdir("/")
    assert collect_code("score.py:score", ["/"], dict(files)) == "score.py:score"
    for refuse in (check_code, load_code):
        with pytest.raises(CodeError, match=r"^'score.py:score': 'score.py' may be .* or .*; give"):
            refuse("score.py:score", {}, files, **REWARD)
    one_file = {names[1].partition(":")[0]: files[names[1].partition(":")[0]]}
    assert collect_code("score.py:score", ["/"], one_file) == names[1], "a run that goes on"
    late = "def score(response, answer, **row):\n    import worth\n    return worth.V\n"
    files |= {f"{tmp_path}/score.py": late, f"{tmp_path}/rewards/score.py": late + "\n"}
    with pytest.raises(CodeError, match=r"imported as 'worth': .*score.py imports 'worth' only"):
        [load_code(name, {}, files, **REWARD) for name in names]


def test_an_object_of_a_notebook_travels_without_its_module(tmp_path):
    (tmp_path / "own_words.py").write_text("def count(text): return len(text.split())\n")
    script = (
        "import own_words, yaml, sys; from rlinf_vl.user_code import pickled; factor = 3\n"
        "def score(response, answer, **row): return own_words.count(response) * factor\n"
        "yaml.safe_dump([pickled(score), pickled(lambda response, answer: 7.0)], sys.stdout)"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (name, path, text), (other, other_path, other_text) = yaml.unsafe_load(told.stdout)
    assert (name, path) == ("score.pkl:score", "score.pkl") and "own_words" not in sys.modules
    files = {path: text, other_path: other_text}
    assert load_code(name, {}, files, **REWARD)("a b", "") == 6
    assert load_code(other, {}, files, **REWARD)("a b", "") == 7.0
    with pytest.raises(CodeError, match="no 'score.pkl' in runner.code_files"):
        load_code(name, {}, {}, **REWARD)
    with pytest.raises(
        CodeError, match="can't travel to the workers: TypeError.*path/to/file.py:Name"
    ):
        pickled(sys._getframe())


def test_a_class_of_a_notebook_keeps_its_base_of_this_package():
    name, path, text = pickled(type("Mine", (SingleTurn,), {}))
    signature = ("start(problem)", "close()")
    mine = load_code(name, {}, {path: text}, kind="environment", signature=signature)
    assert issubclass(mine, SingleTurn)


def test_a_config_anywhere_builds_on_ours_and_finds_code_beside_it(tmp_path, monkeypatch):
    text = "def open_csv(run): return 'of $17 ${x} or ${ in LaTeX'\n"
    (tmp_path / "trackers.py").write_text(text)
    (tmp_path / "mine.yaml").write_text(
        "defaults: [toy-grpo-cpu]\nrunner:\n  experiment_name: mine\n  logger:\n    logger_backends: ['trackers.py:open_csv']\n"
        "data:\n  train_data_paths: rows.jsonl\n"
    )
    (tmp_path / "rows.jsonl").write_text("{}")
    config = load_config(str(tmp_path / "mine.yaml"))
    assert config.data.train_data_paths == [f"{tmp_path}/rows.jsonl"]
    assert config.runner.logger.logger_backends == [f"{tmp_path}/trackers.py:open_csv"]
    assert config.runner.code_files.keys() == {f"{tmp_path}/trackers.py"}
    save_config(config, tmp_path / "run/config.yaml")
    (tmp_path / "trackers.py").unlink()
    again = load_config(str(tmp_path / "run/config.yaml"))
    assert again == config and changed_keys(again, tmp_path / "run/config.yaml") == []
    opened = load_code(
        again.runner.logger.logger_backends[0], {}, again.runner.code_files, **TRACKER
    )
    assert opened(None) == "of $17 ${x} or ${ in LaTeX"
    text = (tmp_path / "run/config.yaml").read_text()
    former = yaml.safe_load(text)
    former["rollout"]["env_files"] = former["runner"].pop("code_files")
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(former))
    assert load_config(str(tmp_path / "run/config.yaml")) == config, "under its former name"


CODE = """
import torch_that_is_not_here
from elsewhere import taken
async def judge(response, answer, question=None, **row): return 1.0
def foreign(completions, solution, **kwargs): return [1.0]
def nothing(): pass
def loss(logprobs, advantages, *, clip): pass
def lenient(logprobs, advantages, **options): pass
def unclipped(logprobs, advantages): pass
def thrice(a, b, c, *, clip): pass
VALUE = 3
class Good:
    def __init__(self, size): pass
    def start(self, problem): pass
    def close(self): pass
class Derived(Good): pass
class Short(object):
    def start(self): pass
    def close(self): pass
class Mute:
    close = None
    def start(self, problem): pass
"""


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("judge", REWARD, None),
        ("foreign", REWARD, None),
        ("nothing", REWARD, "nothing() doesn't take these arguments; a reward is called as score(response, answer, **row) or"),
        ("loss", LOSS, None),
        ("lenient", LOSS, None),
        ("unclipped", LOSS, "unclipped(logprobs, advantages) doesn't take these arguments; a loss is called as loss(logprobs,"),
        ("thrice", LOSS, "thrice(a, b, c, *, clip) doesn't take these arguments"),
        ("los", LOSS, "no function 'los' in {path}; its functions are judge, foreign, nothing, loss, lenient, unclipped, thrice"),
        ("taken", LOSS, None),  # only running it would tell
        ("Good", CLASS, None),
        ("Derived", CLASS, None),
        ("Short", CLASS, "Short.start(self) can't be called as start(problem); an environment has start(problem), close()"),
        ("loss", CLASS, "loss is no class; an environment has start(problem), close()"),
        ("Mute", CLASS, None),
    ],
)  # fmt: skip
def test_what_is_refused_without_running_it(tmp_path, name, wanted, expected):
    (tmp_path / "code.py").write_text(CODE)
    path = f"{tmp_path}/code.py"
    if expected is None:
        return check_code(f"{path}:{name}", {}, {}, **wanted)
    with pytest.raises(CodeError) as error:
        check_code(f"{path}:{name}", {}, {}, **wanted)
    assert expected.format(path=path) in str(error.value)
    working = CODE.replace("import torch_that_is_not_here\nfrom elsewhere import taken", "")
    with pytest.raises(CodeError) as error:
        load_code(f"{path}:{name}", {}, {path: working}, **wanted)
    assert expected.format(path=path).partition("; its")[0] in str(error.value), (
        "the same of the real thing"
    )


def test_a_module_and_an_instance(tmp_path, monkeypatch):
    (tmp_path / "thing_of_test_code.py").write_text(
        "class Family: pass\nFAMILY = Family()\nOTHER = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    wanted = {"kind": "model family", "signature": "Family"}
    assert type(load_code("thing_of_test_code:FAMILY", {}, {}, **wanted)).__name__ == "Family"
    with pytest.raises(CodeError, match="OTHER is an int; a model family is a Family"):
        load_code("thing_of_test_code:OTHER", {}, {}, **wanted)
    with pytest.raises(
        CodeError, match="no_such_module_at_all can't be imported: ModuleNotFoundError"
    ):
        check_code("no_such_module_at_all:X", {}, {}, **wanted)
    assert load_code("one", {"one": "json:dumps"}, {}, **REWARD)([1]) == "[1]", (
        "what is registered isn't looked at"
    )


def test_a_tracker_and_a_family_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(
        "import dataclasses\nfrom rlinf_vl.models.families import FAMILIES\n"
        "FAMILY = dataclasses.replace(FAMILIES['qwen3_vl'], model_type='mine')\n"
        "class Lines:\n"
        "    def __init__(self, run): self.path = run.folder / 'lines.txt'\n"
        "    def log(self, step, metrics): self.path.write_text(f'{step} {sorted(metrics)}')\n"
        "    def log_samples(self, step, split, samples): ...\n"
        "    def close(self): ...\n"
    )
    own = ["runner.logger.logger_backends=[own.py:Lines]", "rollout.model.model_type=own.py:FAMILY"]
    own = [text.replace("own.py", f"{tmp_path}/own.py") for text in own]
    config = load_config("toy-grpo-cpu", own)
    backends, files = config.runner.logger.logger_backends, config.runner.code_files
    (tmp_path / "own.py").unlink()
    trackers = make_trackers(
        tmp_path, backends, project_name="p", experiment_name="e", config={}, files=files
    )
    trackers.log(3, {"reward/mean": 0.5})
    trackers.close()
    assert (tmp_path / "lines.txt").read_text() == "3 ['reward/mean']"
    family = family_of(config.rollout.model.model_type, files=files)
    assert isinstance(family, Family) and family.model_type == "mine"


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.org, localhost"}, "a.org,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a.org", "no_proxy": "b.org"}, "b.org,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_servers_of_this_host_are_called_without_a_proxy(monkeypatch, given, hosts):
    environment = dict(given)
    bypass_proxies(environment)
    assert environment == {"NO_PROXY": hosts, "no_proxy": hosts}
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.setenv(name, (environment | {"http_proxy": "http://127.0.0.1:9"})[name])
    assert urllib.request.proxy_bypass("127.0.0.1:8000")
    with httpx.Client() as client:
        transport = client._transport_for_url(httpx.URL("http://127.0.0.1:8000"))
        assert transport is client._transport
