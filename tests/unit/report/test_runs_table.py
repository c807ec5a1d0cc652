"""`rlinf-vl runs`: each run's state, figures and differences; of long files the end alone."""

import json
from pathlib import Path

import pytest
import yaml

from rlinf_vl.__main__ import main
from rlinf_vl.config import load_config
from rlinf_vl.config.load import save_config
from rlinf_vl.observe.metrics_file import flatten
from rlinf_vl.tools.report import runs_table
from rlinf_vl.tools.report.runs_table import read_lines_of, runs_in


def make_run(folder: Path, name: str, accuracies, *, state="done", lr=1e-4, started=1.0, pid=0):
    run = folder / name
    run.mkdir(parents=True)
    overrides = [f"actor.optim.lr={lr}", f"runner.experiment_name={name}"]
    save_config(load_config("toy-grpo-cpu", overrides), run / "config.yaml")
    with (run / "metrics.jsonl").open("w") as file:
        for step, accuracy in enumerate(accuracies, 1):
            row = {"step": step, "time/step": 36.0, "reward/mean": step / 10}
            if accuracy is not None:
                row |= {"val/accuracy": accuracy, "val/problems": 150}
            file.write(json.dumps(row) + "\n")
    status = {"state": state, "started": started, "total_steps": 4, "pid": pid, "host": "elsewhere"}
    (run / "status.json").write_text(json.dumps(status | {"time": started, "step": 0, "phase": ""}))
    return run


def test_figures_states_and_differences(tmp_path, capsys):
    make_run(tmp_path, "a", [0.2, None, 0.6, 0.5], lr=1e-4, started=3.0)
    make_run(tmp_path, "b", [None, 0.4], state="failed", lr=3e-4, started=2.0)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/status.json").write_text("{torn")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    a, b, c = json.loads(capsys.readouterr().out)
    assert (a["run"], a["state"], a["step"], a["total_steps"]) == ("a", "done", 4, 4)
    assert (a["best"], a["best_step"], a["problems"], a["val"]) == (0.6, 3, 150, 0.5)
    assert a["hours"] == pytest.approx(4 * 36 / 3600) and a["reward"] == 0.4
    assert (b["state"], b["best"], b["step"]) == ("failed", 0.4, 2)
    # Of all keys of two configs, the one that differs, its name aside.
    assert a["differs"] == {"actor.optim.lr": "0.0001"} and b["differs"] == {
        "actor.optim.lr": "0.0003"
    }
    assert (c["state"], c["step"], c["best"], c["differs"]) == ("", 0, None, {})
    assert main(["runs", str(tmp_path)]) == 0
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "run" and "0.600" in first and "actor.optim.lr=0.0001" in first


def test_learning_rate_algorithm_reward_and_data_come_first():
    keys = [
        "runner.seed",
        "data.seed",
        "data.train_data_paths",
        "reward.functions",
        "actor.optim.lr",
    ]
    keys += ["rollout.model.precision", "algorithm.group_size", "algorithm.adv_type"]
    configs = [dict.fromkeys(keys, str(i)) for i in range(2)]
    first_keys = [keys[i] for i in (4, 7, 3, 2, 6, 1)]
    assert list(runs_table._differences(configs)[0])[:6] == first_keys


def test_a_run_whose_process_is_gone_was_killed(tmp_path):
    import platform

    run = make_run(tmp_path, "gone", [0.1], state="running", pid=2**22 + 5)
    status = json.loads((run / "status.json").read_text()) | {"host": platform.node()}
    (run / "status.json").write_text(json.dumps(status))
    (line,) = read_lines_of([run])
    assert line.state == "killed" and "ended without a word" in line.reason


def test_a_folder_without_runs_is_named(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_of_a_long_file_the_end_is_read_and_said(tmp_path, monkeypatch):
    run = make_run(tmp_path, "long", [0.9, *[0.3] * 40])
    size = (run / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(runs_table, "TAIL_BYTES", size // 4)
    (line,) = read_lines_of([run])
    assert not line.is_complete and (line.step, line.best) == (41, 0.3)
    assert "≥ 0.300" in runs_table.runs_table([line])


def test_the_config_read_by_lines_is_that_of_yaml(tmp_path):
    """For every example: the same keys and, of plain values, the same text."""
    from rlinf_vl.config.load import examples

    for name in ("toy-grpo-cpu", "qwen3-vl-2b-grpo-lora-geo3k"):
        config = load_config(str(examples()[name]))
        config.data.system_prompt = "two\nlines: of\n  text\n"
        save_config(config, tmp_path / name / "config.yaml")
        lines = runs_table._config_of(tmp_path / name)
        expected = flatten(yaml.safe_load((tmp_path / name / "config.yaml").read_text()))
        expected = {key: value for key, value in expected.items() if value not in ("[]", "{}")}
        for key, value in expected.items():
            if key.startswith(("cluster.component_placement", "data.system_prompt")):
                continue
            assert key in lines, key
            if not value.startswith("[") and value.replace(".", "").isdigit():
                assert lines[key] == value or float(lines[key]) == float(value)
        assert "data.lines" not in lines and "lines" not in lines


@pytest.mark.slow
def test_a_thousand_runs_cost_no_yaml(tmp_path, monkeypatch):
    """The effect that makes it fast: nothing parses YAML or whole lines of JSON."""
    make_run(tmp_path, "first", [0.5])
    for number in range(30):
        make_run(tmp_path, f"run-{number}", [0.5], started=float(number))
    monkeypatch.setattr(yaml, "load", None)
    monkeypatch.setattr(yaml, "safe_load", None)
    assert len(read_lines_of(runs_in(tmp_path))) == 31
