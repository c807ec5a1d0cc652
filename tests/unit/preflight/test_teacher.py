"""A teacher that can't teach is refused before anything starts."""

import json
import shutil

import pytest

from rlinf_vl.actor.load import load_trainer
from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.preflight.teacher import teacher

KEY = "algorithm.distillation.teacher_path"


@pytest.fixture
def other(toy_folder, tmp_path):
    """The toy's checkpoint with two tokens changed for each other."""
    folder = tmp_path / "other"
    shutil.copytree(toy_folder, folder)
    read = json.loads((folder / "tokenizer.json").read_bytes())
    words = read["model"]["vocab"]
    one, two = (token for token, number in words.items() if number in (40, 41))
    words[one], words[two] = words[two], words[one]
    (folder / "tokenizer.json").write_text(json.dumps(read))
    return folder


def config_of(path, *overrides):
    return load_config("toy-grpo-cpu", [f"{KEY}={path}", *overrides])


def test_a_sound_teacher_is_accepted_and_none_is_not_looked_at(toy_folder):
    assert list(teacher(config_of(toy_folder, f"rollout.model.model_path={toy_folder}"))) == []
    assert list(teacher(load_config("toy-grpo-cpu", []))) == []


def test_a_folder_that_is_no_checkpoint_is_told_by_the_teachers_key(tmp_path):
    (problem,) = teacher(config_of(tmp_path))
    assert problem.startswith(f"{KEY}: {tmp_path} has no config.json")
    (problem,) = teacher(config_of(tmp_path / "nowhere"))
    assert problem.startswith(f"{KEY}: no folder")
    (problem,) = teacher(config_of("toy"))
    assert "export" in problem


def test_another_tokenizer_is_told_with_the_token(toy_folder, other):
    config = config_of(other, f"rollout.model.model_path={toy_folder}")
    (problem,) = teacher(config)
    assert (
        problem.startswith(f"{KEY}: {other} has another tokenizer")
        and "41" in problem
        and "40" in problem
    )
    # Of a name on the hub, or of the toy's own, only then.
    with pytest.raises(RunError, match="another tokenizer"):
        load_trainer(config, str(toy_folder), None, 1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.distillation.top_k=3"], "without a teacher"),
        (["algorithm.distillation.reward_weight=0"], "without a teacher"),
        ([f"{KEY}=x", "algorithm.distillation.weight=0"], "learns nothing from the teacher"),
        (["algorithm.papo.entropy_weight=0.1"], "algorithm.papo.weight is 0"),
        (["algorithm.image_corruption.share=0.01"], "is none"),
        (["algorithm.image_corruption.share=2"], "lie in"),
        (["algorithm.image_corruption.kind=blur"], "noise, mask"),
        (
            [
                "algorithm.image_corruption.share=0.5",
                "algorithm.recompute_logprobs=false",
                "algorithm.importance_sampling_fix=false",
            ],
            "the update is on the clean ones",
        ),
    ],
)
def test_keys_without_effect_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config("toy-grpo-cpu", overrides)


def test_a_teacher_alone_needs_no_group():
    config = config_of("x", "algorithm.distillation.reward_weight=0", "algorithm.group_size=1")
    assert config.algorithm.group_size == 1
    with pytest.raises(ConfigError, match="group_size: 1"):
        config_of("x", "algorithm.group_size=1")
