"""Validations with vision controls: what is asked, what is logged, and what a checkpoint keeps."""

import json

import pytest
from unit.controller.fakes import FakeRun

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.validate import validate_config
from rlinf_vl.controller.vision_controls import plan_controls
from rlinf_vl.data.dataset import FilterResult, RowFacts
from rlinf_vl.data.vision_controls import ImageFacts
from rlinf_vl.errors import ConfigError

CONTROLS = "data.vision_controls=[blank,swapped]"


def rows(*image_numbers):
    facts = {}
    for row, number in enumerate(image_numbers):
        images = () if number is None else (ImageFacts(number, 48, 48, 0),)
        facts[row] = RowFacts(images=images)
    return FilterResult(kept=dict.fromkeys(facts, "1"), facts=facts)


class ControlledRun(FakeRun):
    def __init__(self, folder, *overrides):
        super().__init__(folder, *overrides)
        # Row 7 has no image.
        controls = plan_controls(self.config, rows(1, 2, 3, 4, 5, 6, 7, None))
        object.__setattr__(self.data, "controls", controls)


@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_controls_are_asked_beside_the_questions_and_change_nothing_else(tmp_path, schedule):
    (tmp_path / "plain").mkdir()
    (tmp_path / "controlled").mkdir()
    setting = f"runner.schedule={schedule}"
    plain = FakeRun(tmp_path / "plain", setting)
    plain.train()
    run = ControlledRun(tmp_path / "controlled", setting, CONTROLS)
    run.train()
    asked = [ids for ids in run.pool.asked if ids[0].startswith("blank-val-")]
    kinds = {name.partition("-")[0] for name in asked[0]}
    assert kinds == {"blank", "swapped"} and len(asked[0]) == 2 * 7
    assert [ids for ids in run.pool.asked if ids not in asked] == plain.pool.asked
    assert run.pool.alive == set(), "no control is stored"
    # The same seeds: what these engines answer depends on those alone, not on an image.
    for step, row in run.metrics().items():
        before = plain.metrics()[step]
        assert {name: row[name] for name in before} == before
        if "val/accuracy" in row:
            assert row["val/accuracy_blank"] == row["val/accuracy_swapped"]
            assert row["val/seen"] == row["val/gain_seen"] == 0
            assert run.pool.validated.get(f"blank-val-{step}-0", 0) in (step, 0)
    state = json.loads((run.run_dir / "checkpoints/global_step_3/controller.json").read_text())
    assert {kind: len(shares) for kind, shares in state["first_shares"].items()} == {
        "blank": 7,
        "swapped": 7,
    }


def test_a_resumed_run_counts_its_gain_from_the_same_start(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir(), resumed.mkdir()
    run = ControlledRun(whole, CONTROLS)
    run.train()
    again = ControlledRun(resumed, CONTROLS)
    again.start = whole / "checkpoints/global_step_3"
    again.train()
    last = max(run.metrics())
    assert again.metrics()[last]["val/gain"] == run.metrics()[last]["val/gain"]


def test_rows_without_images_are_refused_if_there_are_no_others():
    config = parse_config("toy-grpo-cpu", [CONTROLS])
    with pytest.raises(ConfigError, match="none of the 2 rows of data.val_data_paths has an image"):
        plan_controls(config, rows(None, None))
    assert {
        kind: sorted(by_row) for kind, by_row in plan_controls(config, rows(1, 2, None)).items()
    } == {
        "blank": [0, 1],
        "swapped": [0, 1],
    }


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["data.vision_controls=[blank,blank]"], "blank is named twice"),
        ([CONTROLS, "data.val_data_paths=[]"], "data.val_data_paths is empty"),
        ([CONTROLS, "data.blank_images=true"], "shows blank images anyway"),
        (["data.vision_controls=[blurred]"], "blurred"),
    ],
)
def test_controls_that_ask_nothing_are_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        validate_config(parse_config("toy-grpo-cpu", overrides))
