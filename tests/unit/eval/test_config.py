"""A training config as one of an evaluation, and what is refused before anything starts."""

import json
from pathlib import Path

import pytest

from rlinf_vl.config import save_config
from rlinf_vl.config.load import parse_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.eval.config import evaluation_config


def evaluated(*overrides, samples=1):
    return evaluation_config("toy-grpo-cpu", overrides, samples, ())


def checkpoint_in(folder: Path, *overrides: str) -> Path:
    """A run's folder with a checkpoint, as far as it is looked at."""
    save_config(parse_config("toy-grpo-cpu", overrides), folder / "config.yaml")
    made = folder / "checkpoints/global_step_7"
    (made / "actor").mkdir(parents=True)
    (made / "actor/.metadata").touch()
    (made / "controller.json").write_text(json.dumps({"step": 7}))
    return made


def test_a_training_config_is_one_of_an_evaluation():
    config, checkpoint = evaluated(
        "data.train_data_paths=[/gone.parquet]", "data.rollout_batch_size=1000"
    )
    assert checkpoint is None
    assert (
        config.runner.experiment_name == "toy-grpo-cpu-eval"
        and config.runner.logger.logger_backends == []
    )
    assert config.data.train_data_paths == config.data.val_data_paths == ["toy"]


@pytest.mark.slow
def test_a_checkpoint_is_named_by_its_folder_or_its_runs(tmp_path):
    made = checkpoint_in(tmp_path / "run")
    for named in (made, tmp_path / "run"):
        config, checkpoint = evaluated(f"checkpoint={named}")
        assert checkpoint == made and config.runner.experiment_name == "run-step_7-eval"
        config, _ = evaluated(f"checkpoint={named}", "runner.experiment_name=mine")
        assert config.runner.experiment_name == "mine-eval"


def test_a_model_takes_the_configs_place(tmp_path):
    config, _ = evaluated(f"model={tmp_path}")
    assert config.rollout.model.model_path == str(tmp_path)
    assert config.runner.experiment_name == f"toy-grpo-cpu-{tmp_path.name}-eval"
    assert evaluated("model=owner/name")[0].rollout.model.model_path == "owner/name"


@pytest.mark.slow
def test_what_can_not_be_evaluated_is_refused(tmp_path):
    made = checkpoint_in(tmp_path / "run", "rollout.model.model_path=toy-maze")
    (tmp_path / "empty").mkdir()
    for overrides, samples, match in [
        (
            (f"checkpoint={tmp_path / 'empty'}",),
            1,
            "neither a complete checkpoint nor a run's folder",
        ),
        (
            (f"checkpoint={made}",),
            1,
            "began with toy-maze, not with rollout.model.model_path=toy; set rollout",
        ),
        ((f"checkpoint={made}", "model=toy"), 1, "give one of them"),
        (("data.val_data_paths=[]",), 1, "data.val_data_paths: empty"),
        ((), 0, "--samples 0"),
        (
            ("algorithm.val_sampling_params.temperature=0",),
            4,
            "all answers to a problem would be the same",
        ),
    ]:
        with pytest.raises(ConfigError, match=match):
            evaluated(*overrides, samples=samples)
    (made / "actor/.metadata").unlink()
    with pytest.raises(ConfigError, match="or its weights"):
        evaluated(f"checkpoint={made}", "rollout.model.model_path=toy-maze")
