"""Which columns of the data an evaluation makes tables of, and checkpoints that can't be read."""

import copy
import json

import pandas as pd
import pytest
from unit.controller.fakes import fake_config

from rlinf_vl.config import save_config
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.extras.eval.evaluate import columns_of, exported


@pytest.fixture
def config(tmp_path):
    """Two files, of which one has no category, and fewer rows than one has difficulties."""
    table = pd.DataFrame({"problem": ["?"] * 60, "answer": ["1"] * 60, "difficulty": range(60)})
    table.assign(category=["area", "angle"] * 30).to_parquet(tmp_path / "one.parquet")
    table[:2].to_json(tmp_path / "two.jsonl", orient="records", lines=True)
    made = fake_config(tmp_path)
    made.data = copy.deepcopy(made.data)
    made.data.val_data_paths = [str(tmp_path / "one.parquet"), str(tmp_path / "two.jsonl")]
    return made


def test_usual_columns_are_taken_where_they_group_rows(config):
    found = columns_of(config, [])
    assert list(found) == ["category"], "60 difficulties are no groups, and there is no data_source"
    assert found["category"] == ["area", "angle"] * 30 + [None] * 2


def test_columns_that_are_asked_for_are_taken_as_they_are(config):
    assert columns_of(config, ["difficulty"]) == {"difficulty": [*range(60), 0, 1]}
    with pytest.raises(
        ConfigError,
        match="--by level: no such column .* columns are answer, category, difficulty, problem",
    ):
        columns_of(config, ["level"])


def test_a_checkpoint_that_can_not_be_read_is_told_and_leaves_nothing(tmp_path, config):
    folder = tmp_path / "run/checkpoints/global_step_1"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/.metadata").write_bytes(b"torn")
    (folder / "controller.json").write_text(json.dumps({"step": 1}))
    save_config(config, tmp_path / "run/config.yaml")
    with (
        pytest.raises(RunError, match="global_step_1 can't be read"),
        exported(folder, tmp_path, "fp32"),
    ):
        raise AssertionError("never here")
    assert not list(tmp_path.glob(".model-*"))
