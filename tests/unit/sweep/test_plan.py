"""The runs of a sweep: which, in which order, under which names; and what is refused before the first begins."""

import json

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.sweep.plan import NAME_LENGTH, check_sweep, plan_sweep, write_sweep


def plan(tmp_path, *overrides, name="sweep"):
    own = (f"runner.output_dir={tmp_path}", f"runner.experiment_name={name}")
    return plan_sweep("toy-grpo-cpu", [*overrides, *own])


def test_every_setting_has_its_first_seed_before_one_has_its_second(tmp_path):
    sweep = plan(
        tmp_path, "runner.seed=1,2", "actor.optim.lr=1e-4,3e-4", "algorithm.group_size=range(4,9,4)"
    )
    assert list(sweep.axes) == ["actor.optim.lr", "algorithm.group_size", "runner.seed"]
    assert [run.name for run in sweep.runs] == [
        f"lr-{lr}_group_size-{size}_seed-{seed}"
        for seed in (1, 2)
        for lr in ("0.0001", "0.0003")
        for size in (4, 8)
    ]
    # Each run's overrides say what its name says, and its folder is in the sweep's.
    config = load_config(sweep.config, sweep.overrides(sweep.runs[5]))
    assert (config.actor.optim.lr, config.algorithm.group_size, config.runner.seed) == (1e-4, 8, 2)
    assert config.runner.output_dir == str(tmp_path / "sweep")
    assert config.runner.experiment_name == "lr-0.0001_group_size-8_seed-2"
    assert config.runner.resume_dir == "auto"


def test_names_tell_keys_with_the_same_end_apart_and_are_short(tmp_path):
    names = [run.name for run in plan(tmp_path, "runner.seed=1,2", "data.seed=3,4").runs]
    assert names[0] == "runner.seed-1_data.seed-3" and len(set(names)) == 4
    long = "x" * 300
    sweep = plan(tmp_path, f"data.prompt_suffix={long},{long}y", "algorithm.loss_type=actor,cispo")
    names = [run.name for run in sweep.runs]
    assert len(set(names)) == 4 and max(map(len, names)) <= NAME_LENGTH


def test_a_value_may_refer_to_a_seed_and_a_list_may_have_one_element(tmp_path):
    sweep = plan(
        tmp_path, "runner.seed=7,8", "data.seed=${runner.seed}", "data.image_keys=images,a"
    )
    config = load_config(sweep.config, sweep.overrides(sweep.runs[-1]))
    assert (config.data.seed, config.data.image_keys) == (8, ["a"])


@pytest.mark.slow
def test_all_mistakes_of_all_runs_come_before_the_first_begins(tmp_path):
    sweep = plan(tmp_path, "algorithm.group_size=8,0", "actor.optim.lr=1e-4,-1", "runner.seed=1,2")
    with pytest.raises(ConfigError) as caught:
        check_sweep(sweep, ())
    # Each mistake once, with the first run that makes it.
    first, second = caught.value.problems
    assert first.startswith("run group_size-8_lr--1_seed-1: actor.optim.lr: ")
    assert second.startswith("run group_size-0_lr-0.0001_seed-1: algorithm.group_size: ")
    assert not sweep.folder.exists()


@pytest.mark.slow
def test_a_folder_has_one_sweep_and_no_run(tmp_path):
    sweep = plan(tmp_path, "runner.seed=1,2", "runner.max_steps=3")
    write_sweep(sweep)
    check_sweep(sweep, ())  # the same command again
    with pytest.raises(ConfigError, match=r'has a sweep with fixed \["runner.max_steps=3"\]'):
        check_sweep(plan(tmp_path, "runner.seed=1,2", "runner.max_steps=4"), ())
    with pytest.raises(ConfigError, match="has a sweep with axes"):
        check_sweep(plan(tmp_path, "runner.seed=1,2,3", "runner.max_steps=3"), ())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="is the folder of a run"):
        check_sweep(plan(tmp_path, "runner.seed=1,2", name="run"), ())
