"""Arguments that a shell or a habit made something else of: what is printed is the argument that works."""

import re
import shlex
import subprocess

import pytest

from rlinf_vl.config import load_config, parse_config
from rlinf_vl.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "key", "meant"),
    [
        ("data.system_prompt='Answer, please'", "data.system_prompt", "Answer, please"),
        (
            "data.system_prompt='Look (closely) at $5!'",
            "data.system_prompt",
            "Look (closely) at $5!",
        ),
        (
            '''data.system_prompt="What's in it (all)?"''',
            "data.system_prompt",
            "What's in it (all)?",
        ),
        ("data.system_prompt=Look closely at it", "data.system_prompt", "Look closely at it"),
        ("'data.system_prompt=Say \"yes\" (or no)'", "data.system_prompt", 'Say "yes" (or no)'),
        ("runner.output_dir='~/runs'", "runner.output_dir", "/runs"),
        (
            "data.train_data_paths=a.parquet,b.parquet",
            "data.train_data_paths",
            ["/a.parquet", "/b.parquet"],
        ),
        ("data.train_data_paths=['a (1).parquet']", "data.train_data_paths", ["/a (1).parquet"]),
        ("data.image_keys=[left, right]", "data.image_keys", ["left", "right"]),
        ("actor.optim={lr: 1e-5, clip_grad: 2}", "actor.optim.clip_grad", 2.0),
        ("actor.optim={lr:1e-5,clip_grad:2}", "actor.optim.lr", 1e-5),
        (
            "rollout.env_kwargs={tries:3,name:'x y'}",
            "rollout.env_kwargs",
            {"tries": 3, "name": "x y"},
        ),
        (
            "reward.functions=[{function:math,weight:2}]",
            "reward.functions",
            [{"function": "math", "weight": 2}],
        ),
        (
            "reward.functions=[{function: math}, {function: format}]",
            "reward.functions",
            [{"function": "math"}, {"function": "format"}],
        ),
        (
            "rollout.env_kwargs={'prompt': 'Look (here)'}",
            "rollout.env_kwargs",
            {"prompt": "Look (here)"},
        ),
        ("runner.max_steps 3", "runner.max_steps", 3),
        ("runner.max_steps = 3", "runner.max_steps", 3),
    ],
)
def test_the_printed_argument_works_in_a_shell(typed, key, meant, monkeypatch):
    def words_of(line: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
        )
        return done.stdout.split("\0")[:-1]

    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/")
    after = "runner.seed=7"  # further overrides are left alone
    with pytest.raises(ConfigError) as error:
        load_config("toy-grpo-cpu", [*words_of(typed), after])
    (problem,) = error.value.problems
    printed = re.search(r"write (.*)$", problem)[1]
    assert len(shlex.split(printed)) == 1
    config = parse_config("toy-grpo-cpu", [*words_of(printed), after])
    assert config.runner.seed == 7
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    assert value == meant or str(value).endswith(str(meant))


def test_one_element_needs_no_list(tmp_path):
    overrides = [
        "data.train_data_paths=toy",
        "runner.profile.steps=3",
        "data.val_data_paths=${data.train_data_paths}",
    ]
    config = parse_config("toy-grpo-cpu", overrides)
    assert config.data.train_data_paths == config.data.val_data_paths == [
        "toy"
    ] and config.runner.profile.steps == [3]
    (tmp_path / "own.yaml").write_text("defaults: [toy-grpo-cpu]\ndata:\n  image_keys: picture\n")
    assert parse_config(str(tmp_path / "own.yaml")).data.image_keys == ["picture"]


def test_a_config_anywhere_builds_on_ours_and_on_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text(
        "defaults: [toy-grpo-cpu]\nrunner:\n  max_steps: 3\n  seed: 1\n"
    )
    name = "my exp.v2=a.yaml"
    (tmp_path / name).write_text("defaults: [base]\nrunner:\n  experiment_name: mine\n  seed: 2\n")
    config = load_config(str(tmp_path / name))
    assert (config.runner.max_steps, config.runner.seed, config.runner.experiment_name) == (
        3,
        2,
        "mine",
    )
    monkeypatch.chdir(tmp_path)
    assert load_config(name) == load_config(name.removesuffix(".yaml")) == config
    (tmp_path / "toy-grpo-cpu.yaml").write_text("defaults: [base]\n")
    assert load_config("toy-grpo-cpu").runner.max_steps == 80, "a bare name is ours first"
