"""Calibration files, the fit, and the verb `preflight --time`."""

import json

import numpy as np
import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config.load import load_config, parse_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.preflight import calibration
from rlinf_vl.preflight.calibration import Calibration, find, fit, save
from rlinf_vl.preflight.cost import steps_of
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.gpu_kinds import GPU_KINDS
from rlinf_vl.preflight.prediction import PREDICTION, write_prediction
from rlinf_vl.preflight.rates import rates_of

LENGTHS = Lengths(24.0, 9.0, 13.0, 14.0)
SPLIT = "cluster.component_placement={actor: 0, rollout: 1}"


def calibrated() -> Calibration:
    return Calibration(rates_of(GPU_KINDS["h100"]), LENGTHS, "toy", "cpu", 0.02)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLINF_VL_CACHE", str(tmp_path))
    return tmp_path


def test_the_fit_finds_factors_and_keeps_none_below_zero():
    rng = np.random.default_rng(0)
    rows = rng.uniform(1, 100, (12, 3))
    factors, residual = fit(rows.tolist(), (rows @ [0.5, 0.0, 2.0]).tolist())
    assert factors == pytest.approx([0.5, 0, 2], abs=1e-9) and residual < 1e-9
    noisy = rows @ [0.5, -0.1, 2.0] * rng.uniform(0.98, 1.02, 12)
    factors, residual = fit(rows.tolist(), noisy.tolist())
    assert factors.min() == 0 and 0 < residual < 0.1


def test_a_file_is_of_one_machine_and_model(monkeypatch):
    save(calibrated())
    assert find("cpu", "toy") == calibrated()
    assert find("cpu", "other") is None and find("cuda", "toy") is None
    monkeypatch.setattr(calibration, "machine", lambda: "another")
    assert find("cpu", "toy") is None


def test_a_file_of_another_version_is_not_used():
    path = save(calibrated())
    content = json.loads(path.read_text())
    del content["rates"]["products"]
    path.write_text(json.dumps(content))
    assert find("cpu", "toy") is None


def test_the_verb_names_the_cheapest_and_the_fastest(capsys):
    assert main(["preflight", "toy-grpo-cpu", "--time"]) == 2
    assert "rlinf-vl calibrate toy-grpo-cpu" in capsys.readouterr().err
    save(calibrated())
    options = ["--time", "--price", "2", "--response-tokens", "12"]
    assert main(["preflight", "toy-grpo-cpu", *options, SPLIT]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("|")][2:]
    # Split as it is, collocated, and split with two schedules ahead.
    assert len(rows) == 4
    assert "runner.schedule=async" in printed and "responses of 12" in printed
    assert "- fastest with runner.schedule=sync: " in printed
    assert "- cheapest with runner.schedule=sync: " in printed


def test_a_run_on_a_calibrated_machine_has_an_estimate(tmp_path):
    config = parse_config("toy-grpo-cpu", [SPLIT, "runner.schedule=one_step_off"])
    write_prediction(config, "toy", tmp_path)
    assert not (tmp_path / PREDICTION).exists()
    save(calibrated())
    write_prediction(config, "toy", tmp_path)
    content = json.loads((tmp_path / PREDICTION).read_text())
    assert content["schedule"] == "one_step_off"
    assert 0 < content["seconds"] < sum(content["phases"].values()) + 2


def test_the_steps_are_those_of_the_rows_that_are_here(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "1 + 1?", "answer": "2"}\n' * 43)
    overrides = ["runner.max_epochs=3", "data.rollout_batch_size=8"]

    def steps(path, *further):
        overridden = [*overrides, f"data.train_data_paths=[{path}]", *further]
        return steps_of(parse_config("qwen3-vl-2b-grpo-fsdp-geo3k", overridden))

    assert steps(file, "runner.max_steps=-1") == 15
    assert steps(file, "runner.max_steps=4") == 4
    assert steps("/nowhere/rows.jsonl", "runner.max_steps=-1") is None
    assert steps("hf://owner/name", "runner.max_steps=7") == 7


def test_a_config_is_counted_without_its_data_and_trackers():
    overrides = ["data.train_data_paths=[/nowhere/rows.parquet]", "data.val_data_paths=[]"]
    overrides += ["runner.logger.logger_backends=[trackio]"]
    load_config("qwen3-vl-2b-grpo-fsdp-geo3k", overrides, needs_machine=False)
    with pytest.raises(ConfigError) as caught:
        load_config("qwen3-vl-2b-grpo-fsdp-geo3k", overrides)
    assert any("no file '/nowhere/rows.parquet'" in problem for problem in caught.value.problems)
