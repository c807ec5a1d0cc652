"""The verb `replay` on runs of the toy: a step of a sound run agrees, and a run that the mismatch guard ends has written the step
that shows why."""

import json
import shutil

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.engines.torch.sampling import Sampler
from rlinf_vl.observe import alarms
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.report.build import build_report

pytestmark = pytest.mark.e2e


@pytest.fixture
def small(toy_folder, tmp_path) -> list[str]:
    return [
        "cluster.backend=local", f"rollout.model.model_path={toy_folder}", f"runner.output_dir={tmp_path}",
        "runner.max_steps=3", "runner.save_interval=1", "runner.val_check_interval=-1", "runner.val_before_train=false",
        "data.rollout_batch_size=3", "algorithm.group_size=3", "algorithm.sampling_params.temperature=0.5",
        "algorithm.entropy_bonus=0.01", "runner.experiment_name=run",
    ]  # fmt: skip


def test_a_step_of_a_sound_run_agrees(small, tmp_path, capsys):
    assert main(["train", "toy-grpo-cpu", *small]) == 0
    run = tmp_path / "run"
    assert main(["replay", str(run), "--step", "3"]) == 0
    file = run / "replays" / "step_3.replay"
    assert file.stat().st_size < 5_000_000
    step = RecordedStep.read(file)
    # Sampled again from the checkpoint before, the groups are the run's.
    assert step.metrics["step"] == 3 and len(step.groups) == 3 and step.train_logprobs
    capsys.readouterr()
    assert main(["replay", str(file), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["sound"] and outcome["first"] is None
    compared = {(entry["stage"], entry["sides"][0]) for entry in outcome["agreements"]}
    assert {("pixels", "run"), ("engine weights", "run"), ("gradient norm", "run")} <= compared
    assert main(["replay", str(run), "--step", "3", "--group", "1", "--shape-only"]) == 0
    small_file = run / "replays" / "step_3_group_1.replay"
    assert small_file.stat().st_size < 200_000 and len(RecordedStep.read(small_file).groups) == 1
    assert main(["replay", str(run), "--step", "9"]) == 2
    assert "has steps 1 to 3" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_an_alarms_replay_needs_no_checkpoint_of_its_step(
    small, tmp_path, backend, monkeypatch, capsys
):
    """The alarm begins behind the second update: the file has the weights before it, on both backends."""
    monkeypatch.setattr(alarms, "WINDOW", 1)
    monkeypatch.setattr(alarms, "MISMATCH", 0.0)
    monkeypatch.setattr(alarms, "MISMATCH_GROWTH", 0.0)
    keys = ["runner.max_steps=2", "runner.save_interval=-1", f"cluster.backend={backend}"]
    assert main(["train", "toy-grpo-cpu", *small, *keys]) == 0
    file = shutil.move(tmp_path / "run/replays/step_2.replay", tmp_path / "sent.replay")
    shutil.rmtree(tmp_path / "run")
    capsys.readouterr()
    assert main(["replay", str(file), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["sound"] and outcome["weights"] == "in the file"
    compared = {(entry["stage"], entry["sides"][0]) for entry in outcome["agreements"]}
    # Equal to the run's own engine and trainer: these are its weights of that step.
    assert {("rollout logprobs", "run"), ("old logprobs", "run")} <= compared
    assert {("logprobs", "engine"), ("weight after the step", "trainer")} <= compared


def test_a_run_that_the_guard_ends_writes_its_replay(small, tmp_path, monkeypatch, capsys):
    init = Sampler.__init__

    def untempered(self, params, banned):
        init(self, params, banned)
        self.divides = False

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "__init__", untempered)
        assert main(["train", "toy-grpo-cpu", *small]) == 1
    run = tmp_path / "run"
    file = run / "replays" / "step_1.replay"
    step = RecordedStep.read(file)
    assert "stale" in step.reason and step.weights
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["message"] for e in events if e["kind"] == "replay_written"][0].endswith(str(file))
    assert f"rlinf-vl replay {file}" in build_report([run]).read_text()
    capsys.readouterr()
    assert main(["replay", str(file)]) == 1
    said = capsys.readouterr().out
    assert "rollout logprobs" in said.split("FIRST DIFFERENCE")[0].splitlines()[-1]
    assert "tested: these are the logprobs at temperature 1, not 0.5" in said
