"""Names of hubs' environments in a config: sources with their arguments, and what to install."""

import sys
from types import ModuleType

import pytest

from rlinf_vl.config import load_config, save_config
from rlinf_vl.config.hubs import parse_rows_path, rows_path, with_arguments
from rlinf_vl.tools.check import inputs

WORDS = ("rollout.env_class=verifiers:words", "data.train_data_paths=[verifiers://words]")
NO_VAL = "data.val_data_paths=[]"


@pytest.mark.slow
def test_a_source_carries_the_environments_arguments_and_no_stale_ones(tmp_path):
    arguments = {"level": "hard", "n": 3, "parts": ["a?", "b/ä"]}
    path = rows_path("owner/words", arguments)
    assert parse_rows_path(path) == ("owner/words", arguments)
    assert with_arguments([path, "hf://a/b"], {}) == ["verifiers://owner/words", "hf://a/b"]
    config = load_config("toy-grpo-cpu", (*WORDS, NO_VAL, "+rollout.env_kwargs.n=3"))
    (source,) = config.data.train_data_paths
    assert parse_rows_path(source) == ("words", {"n": 3})
    # A resumed run with another argument: its config has the former one.
    save_config(config, tmp_path / "config.yaml")
    resumed = load_config(str(tmp_path / "config.yaml"), ["rollout.env_kwargs.n=5"])
    assert parse_rows_path(resumed.data.train_data_paths[0]) == ("words", {"n": 5})
    assert resumed.rollout.verifiers_name == "words" and resumed.rollout.has_agents


@pytest.mark.parametrize(
    "installed, module, words",
    [
        (None, "json", ["verifiers is not installed", "pip install 'rlinf_vl[verifiers]'"]),
        ("0.4.1", "json", ["0.4.1 has no load_environment", "rlinf_vl[verifiers]"]),
        ("0.3.1", "no-such-words", ["no module 'no_such_words'", "prime env install no-such-words"]),
        ("0.3.1", "owner/json", None),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_what_installs_it(monkeypatch, installed, module, words):
    from importlib.metadata import PackageNotFoundError

    from rlinf_vl.extras.verifiers import rows as verifiers_rows

    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(verifiers_rows, "version", version)
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    overrides = (f"rollout.env_class=verifiers:{module}", f"data.train_data_paths=[verifiers://{module}]")  # fmt: skip
    config = load_config("toy-grpo-cpu", (*overrides, NO_VAL))
    reasons = [text for text in inputs.packages_missing(config) if "rollout.env_class" in text]
    assert len(reasons) == (words is not None)
    assert all(word in reason for reason in reasons for word in words)


def test_openenv_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    config = load_config("toy-grpo-cpu", ["rollout.env_class=openenv:http://127.0.0.1:8000"])
    (missing,) = inputs._environment(config)
    assert "pip install 'rlinf_vl[openenv]'" in missing


def test_a_clients_file_travels_with_the_config(tmp_path):
    (tmp_path / "shop.py").write_text("class Shop: ...\n")
    config = load_config("toy-grpo-cpu", [f"rollout.env_class=openenv:{tmp_path}/shop.py:Shop"])
    assert config.rollout.env_class == f"openenv:{tmp_path}/shop.py:Shop"
    assert list(config.runner.code_files) == [f"{tmp_path}/shop.py"]
