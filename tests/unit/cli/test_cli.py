"""What the command line says: versions, keys, starts of own files, completion."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.load import examples, load_config


def said(capsys, *words):
    """Exit code, output and errors of a command."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("words", [["config"], ["config", "runner"]])
def test_a_reader_that_leaves_is_no_error(words):
    """As in `rlinf-vl config | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rlinf_vl", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_python_without_our_packages_names_the_environment(tmp_path):
    (tmp_path / ".venv").mkdir()
    package = Path(__file__).parents[3]
    command = [sys.executable, "-S", "-m", "rlinf_vl", "config"]
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert " is not installed in " in done.stderr
    assert done.stderr.endswith("source .venv/bin/activate\n")


def test_versions(capsys):
    code, text, _ = said(capsys, "--version")
    assert code in (0, None) and re.match(
        r"rlinf_vl \d+\.\d+\.\d+ \(Python 3\.\d+.*, torch 2\..*, transformers 5\.", text
    )


def test_the_help_of_train_has_every_config_and_every_key(capsys):
    _, text, _ = said(capsys, "train", "--help")
    names = [name for name, path in examples().items() if path.parent.parent.name != "recipes"]
    assert all(re.search(rf"^  {re.escape(name)} ", text, re.MULTILINE) for name in names)
    assert "toy-grpo-cpu" in names and "papo-3b" not in names and "docs/recipes.md" in text
    words = set(text.split())
    assert {name.rpartition(".")[2] for name in config_keys()} <= words


def test_keys_are_shown_with_defaults_and_meaning(capsys):
    code, text, _ = said(capsys, "config")
    assert (
        code == 0
        and "runner.max_steps = -1\n" in text
        and "runner.experiment_name = (must be given)" in text
    )
    _, text, _ = said(capsys, "config", "rollout.model.precision")
    assert (
        text.startswith("rollout.model.precision = 'bf16'\n")
        and "Allowed: fp32, bf16, fp16." in text
    )
    _, text, _ = said(capsys, "config", "actor.optim")
    assert text.count("actor.optim.") == len(
        [key for key in config_keys() if key.startswith("actor.optim.")]
    )
    _, text, _ = said(capsys, "config", "clip_ratio")
    shown = re.findall(r"^(\S+) = ", text, re.MULTILINE)
    assert len(shown) >= 3 and shown == [key for key in config_keys() if "clip_ratio" in key]


@pytest.mark.slow
def test_a_new_experiment_and_environment_are_sound(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = said(capsys, "new", "experiment", "first-try")
    assert (
        code == 0
        and text.startswith("wrote first-try.yaml\n")
        and "rlinf-vl train first-try.yaml" in text
    )
    assert said(capsys, "train", "first-try.yaml", "--check")[0] == 0
    _, text, _ = said(capsys, "new", "env", "ask-twice")
    assert "rollout.env_class=ask_twice.py:AskTwice" in text
    code, text, _ = said(capsys, "check-env", "ask_twice.py:AskTwice", "tries=3")
    assert code == 0 and "holds the contract" in text
    assert (
        said(capsys, "train", "toy-grpo-cpu", "rollout.env_class=ask_twice.py:AskTwice", "--check")[
            0
        ]
        == 0
    )


@pytest.mark.slow
def test_a_new_reward_scores(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "new", "reward", "mine")[0] == 0
    printed = subprocess.run(
        [sys.executable, "mine.py"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[0] == "{'score': 1.0, 'right': 1.0, 'brief': 1.0}"
    code, text, _ = said(capsys, "check-reward", "mine.py:mine")
    assert code == 0 and "LOOK" not in text, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "key", "printed"),
    [
        # ratios 1 and e^0.5, clipped at 1.2; a clipped token has no gradient
        ("loss", "algorithm.loss_type", "[-1.0, -1.2000000476837158] [-1.0, 0.0]"),
        ("estimator", "algorithm.adv_type", "tensor([ 0.7071, -0.3536], dtype=torch.float64)"),
    ],
)
def test_a_new_loss_and_estimator_run(capsys, tmp_path, monkeypatch, kind, key, printed):
    monkeypatch.chdir(tmp_path)
    _, text, _ = said(capsys, "new", kind, "mine")
    assert f"{key}=mine.py:mine" in text
    output = subprocess.run(
        [sys.executable, "mine.py"], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == printed
    assert said(capsys, "train", "toy-grpo-cpu", f"{key}=mine.py:mine", "--check")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlinf-vl prefl", {"preflight"}),
        ("rlinf-vl train toy-grpo-cpu-l", {"toy-grpo-cpu-lora"}),
        ("rlinf-vl train own", {"own.yaml"}),
        (
            "rlinf-vl train toy-grpo-cpu runner.max_st",
            {"runner.max_steps=", "runner.max_staleness="},
        ),
        (
            "rlinf-vl train toy-grpo-cpu cluster.device=c",
            {"cluster.device=cpu", "cluster.device=cuda"},
        ),
        ("rlinf-vl train toy-grpo-cpu data.shuffle=", {"data.shuffle=true", "data.shuffle=false"}),
        ("rlinf-vl config algorithm.kl_b", {"algorithm.kl_beta"}),
        ("rlinf-vl new re", {"reward"}),
    ],
)
def test_the_shell_completes(tmp_path, line, expected):
    (tmp_path / "own.yaml").write_text("defaults: [toy-grpo-cpu]\n")
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
    }
    asked |= {
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
        "_ARGCOMPLETE_COMP_WORDBREAKS": " ",
    }
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'rlinf-vl'; from rlinf_vl.__main__ import main; main()",
    ]
    subprocess.run(command, cwd=tmp_path, env=os.environ | asked, timeout=60)
    assert {word.strip() for word in (tmp_path / "out").read_text().split("\n")} == expected


def test_the_script_for_the_shell(capsys):
    code, text, _ = said(capsys, "completion", "bash")
    assert code == 0 and text.startswith('# eval "$(rlinf-vl completion bash)"')
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_reward_functions_may_be_bare_names(tmp_path):
    (tmp_path / "f.py").write_text("def g(response, answer):\n    return 1.0\n")
    functions = load_config(
        "toy-grpo-cpu", [f"reward.functions=[math,{tmp_path}/f.py:g]"]
    ).reward.functions
    assert [entry["function"].rpartition("/")[2] for entry in functions] == ["math", "f.py:g"]
    (alone,) = load_config("toy-grpo-cpu", ["reward.functions=exact"]).reward.functions
    assert alone == {"function": "exact"}


def test_a_folder_of_runs_is_reported_as_a_table(tmp_path, capsys):
    for number, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        rows = [
            {"step": 1, "val/accuracy": 0.9},
            {"step": 2, "reward/mean": 0.25, "val/accuracy": 0.5},
        ]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows)
        )
        status = {"state": "done", "started": 1e9 + number, "total_steps": 2, "host": "elsewhere"}
        (tmp_path / name / "status.json").write_text(json.dumps(status))
    (tmp_path / "datasets").mkdir()
    code, text, _ = said(capsys, "report", str(tmp_path))
    heading, *lines = text.splitlines()
    assert code == 0 and heading.split()[:3] == ["run", "state", "step"]
    assert [line.split()[:6] for line in lines] == [
        ["second", "done", "2/2", "0.250", "0.500", "0.900"],
        ["first", "done", "2/2", "0.250", "0.500", "0.900"],
    ]
