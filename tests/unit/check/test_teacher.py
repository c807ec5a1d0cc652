"""A teacher that can't teach is refused before anything starts."""

import json
import shutil
from dataclasses import replace

import pytest

from rlinf_vl.actor.load import load_trainer
from rlinf_vl.config import load_config
from rlinf_vl.data.dataset import open_datasets
from rlinf_vl.data.unusable import NO_TEACHER
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.errors import RunError
from rlinf_vl.rollout.episode.env_makers import env_maker_of
from rlinf_vl.rollout.episode.row_check import RowCheck
from rlinf_vl.tools.check.teacher import teachers

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
    assert list(teachers(config_of(toy_folder, f"rollout.model.model_path={toy_folder}"))) == []
    assert list(teachers(load_config("toy-grpo-cpu", []))) == []


def test_another_tokenizer_is_told_with_the_token(toy_folder, other):
    config = config_of(other, f"rollout.model.model_path={toy_folder}")
    (problem,) = teachers(config)
    assert problem.startswith(f"{KEY}: {other} ")
    # Of a name on the hub, or of the toy's own, only then.
    with pytest.raises(RunError, match="another tokenizer"):
        load_trainer(config, str(toy_folder), None, 1)


TWO = "algorithm.distillation={teachers: {red: ONE, blue: OTHER}, teacher_key: colour}"


HINT = "algorithm.distillation.privileged_template='the answer is {answer}'"


def test_the_policy_may_be_its_own_teacher(toy_folder, tmp_path):
    """Its checkpoint is checked as the policy's; a row must have what the template names."""
    keys = (f"rollout.model.model_path={toy_folder}", "rollout.max_turns=1")
    config = config_of("self", *keys, HINT)
    assert list(teachers(config)) == []
    lines = [{"hint": "x"}, {"hint": ""}, {}]
    text = [json.dumps({"problem": "1 + 1?", "answer": "2"} | line) for line in lines]
    (tmp_path / "rows.jsonl").write_text("\n".join(text))
    paths = f"data.train_data_paths=[{tmp_path}/rows.jsonl]"
    config = config_of("self", *keys, HINT.replace("answer}", "hint}"), paths, "data.image_keys=[]")
    dataset = open_datasets(config.data, ENVIRONMENTS)["train"]
    result = RowCheck(config, None, env_maker_of(config)).filter(dataset, range(3), lambda *_: None)
    assert list(result.kept) == [0]
    assert "privileged_template: {hint} has no value" in result.bad[1].reason
    assert "which has hint, answer" in result.bad[1].reason


def two_teachers(one, other, *overrides):
    keys = TWO.replace("ONE", str(one)).replace("OTHER", str(other))
    return load_config("toy-grpo-cpu", [keys, *overrides])


@pytest.mark.slow
def test_each_of_several_teachers_is_checked_and_told_by_its_label(toy_folder, other, tmp_path):
    model = f"rollout.model.model_path={toy_folder}"
    assert list(teachers(two_teachers(toy_folder, toy_folder, model))) == []
    config = two_teachers(toy_folder, other, model)
    (problem,) = teachers(config)
    assert problem.startswith(f"algorithm.distillation.teachers.blue: {other} has another tokeniz")
    with pytest.raises(RunError, match=r"distillation\.teachers\.blue: .* another tokenizer"):
        load_trainer(config, str(toy_folder), None, 1)
    red, blue = teachers(two_teachers(tmp_path / "a", tmp_path / "b", model))
    assert "teachers.red: no folder" in red and "teachers.blue: no folder" in blue


@pytest.mark.slow
def test_labels_of_one_checkpoint_share_a_teacher():
    distillation = two_teachers("x", "x").algorithm.distillation
    assert distillation.labels_by_path == {"x": ("red", "blue")}
    assert two_teachers("x", "y").algorithm.distillation.labels_by_path == {
        "x": ("red",),
        "y": ("blue",),
    }
    assert config_of("x").algorithm.distillation.labels_by_path == {"x": ()}
    assert distillation.label_of({"colour": "red", "n": 1}) == "red"
    assert distillation.label_of({"colour": 7}) == "7" and distillation.label_of({}) is None


def test_a_row_without_a_teacher_is_refused_before_the_run(toy_folder, tmp_path):
    rows = [{"colour": "red"}, {"colour": "green"}, {"shape": "disc", "n": 3}, {"colour": "r" * 99}]
    lines = [json.dumps({"problem": "1 + 1?", "answer": "2"} | row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    paths = f"data.train_data_paths=[{tmp_path}/rows.jsonl]"
    model = f"rollout.model.model_path={toy_folder}"
    config = two_teachers(toy_folder, toy_folder, model, paths, "data.image_keys=[]")
    dataset = open_datasets(config.data, ENVIRONMENTS)["train"]
    check = RowCheck(config, None, env_maker_of(config))
    result = check.filter(dataset, range(4), lambda *_: None)
    assert list(result.kept) == [0] and {bad.kind for bad in result.bad.values()} == {NO_TEACHER}
    green, disc, long = (result.bad[row].reason for row in (1, 2, 3))
    known = "algorithm.distillation.teachers has red, blue"
    assert f"column 'colour' holds 'green', and {known}; add a teacher" in green
    assert "no label in column 'colour'" in disc and "are shape, n, and teachers are" in disc
    assert "no label in column 'colour'" in long, "a label has at most 64 characters"
    validation = replace(check, for_training=False)
    assert len(validation.filter(dataset, range(4), lambda *_: None).kept) == 4, "nobody teaches"


def test_a_teacher_alone_needs_no_group():
    config = config_of("x", "algorithm.distillation.reward_weight=0", "algorithm.group_size=1")
    assert config.algorithm.group_size == 1
