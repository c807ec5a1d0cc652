"""Searches without training: the space, what is refused, the trials that are asked and told, and a study that goes on."""

import json

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.report.runs_table import read_folder, runs_table
from rlinf_vl.report.sweep import build_sweep_report, group_by_setting, read_sweep
from rlinf_vl.report.trials import read_sweep_file, trials_in
from rlinf_vl.sweep.plan import check_sweep, plan_sweep
from rlinf_vl.sweep.study import Study

SPACE = ("actor.optim.lr=tag(log, interval(1e-5, 1e-3))", "algorithm.group_size=choice(4,8)")
STEPS = "runner.max_steps=int(interval(1, 3))"


def plan(tmp_path, *overrides, trials: int | None = 3, objective: str | None = None):
    own = (f"runner.output_dir={tmp_path}", "runner.experiment_name=search")
    return plan_sweep("toy-grpo-cpu", [*overrides, *own], trials, objective)


def open_study(sweep) -> Study:
    sweep.folder.mkdir(exist_ok=True)
    return Study(sweep, sweep.search)


def finish(sweep, run, *accuracies, state="done"):
    """Write what a run that has ended leaves: one validation before training, and those given."""
    folder = sweep.run_dir(run)
    folder.mkdir(parents=True)
    rows = [{"step": step, "val/accuracy": value} for step, value in enumerate((0.99, *accuracies))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "status.json").write_text(json.dumps({"state": state, "host": "elsewhere"}))
    (folder / "config.yaml").write_text(json.dumps({"runner": {"seed": 1}}))


def test_lists_and_intervals_are_searched_and_seeds_are_not(tmp_path):
    sweep = plan(tmp_path, "runner.seed=1,2", *SPACE, STEPS)
    assert sweep.runs == () and sweep.size == "3 trials, 2 runs each"
    assert list(sweep.search.dimensions) == [
        "actor.optim.lr",
        "algorithm.group_size",
        "runner.max_steps",
    ]
    assert sweep.content["axes"] == {
        "actor.optim.lr": ["tag(log, interval(1e-05, 0.001))"],
        "algorithm.group_size": ["4", "8"],
        "runner.max_steps": ["int(interval(1, 3))"],
        "runner.seed": ["1", "2"],
    }
    assert sweep.search.seed == 1  # the sampler's, of the first seed
    study = open_study(sweep)
    runs = [study.next_run() for _ in range(6)]
    assert study.next_run() is None
    assert [run.name for run in runs[:3]] == [
        "trial-000_seed-1",
        "trial-000_seed-2",
        "trial-001_seed-1",
    ]
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        config, other = (load_config(sweep.config, sweep.overrides(run)) for run in (first, second))
        assert (config.runner.seed, other.runner.seed) == (1, 2)
        assert (
            config.actor.optim.lr == other.actor.optim.lr == float(first.values["actor.optim.lr"])
        )
        assert 1e-5 <= config.actor.optim.lr <= 1e-3
        assert config.algorithm.group_size in (4, 8) and config.runner.max_steps in (1, 2, 3)


@pytest.mark.parametrize(
    "override, message",
    [
        ("runner.seed=1,2", "no override but seeds lists values"),
        ("runner.seed=int(interval(1,9))", "seeds are repetitions of a trial"),
        ("actor.optim.lr=interval(1e-3,1e-5)", "begins below its end"),
        ("actor.optim.lr=tag(log,interval(0,1))", "begins above 0"),
        ("actor.optim.lr=tag(linear,interval(0,1))", "the tag linear says nothing here"),
        ("algorithm.group_size=4,4", "algorithm.group_size has a value twice"),
        ("hydra.sweeper.direction=minimize", "`--objective METRIC`, which is maximized"),
        ("runner.val_check_interval=-1 algorithm.group_size=4,8", "these runs do not validate"),
    ],
)
def test_what_can_not_be_searched_is_refused_by_name(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, *override.split())


def test_the_plugins_keys_are_translated(tmp_path):
    overrides = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", *SPACE)
    sweep = plan(tmp_path, *overrides, trials=None, objective="reward/mean")
    assert (sweep.search.n_trials, sweep.search.objective) == (7, "reward/mean")
    with pytest.raises(ConfigError, match="--objective x: is for a search"):
        plan(tmp_path, "runner.seed=1,2", trials=None, objective="x")


def test_without_optuna_the_error_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["train", "toy-grpo-cpu", "--multirun", "--trials", "3", SPACE[1]]
    assert main([*words, f"runner.output_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "optuna, which is not installed; pip install 'rlinf_vl[search]'" in error
    with pytest.raises(ConfigError, match="--trials 0: give a number from 1 on"):
        plan(tmp_path, *SPACE, trials=0)


def test_the_command_line_checks_a_search_and_refuses_trials_without_multirun(tmp_path, capsys):
    words = ["train", "toy-grpo-cpu", "--check", "--trials", "3", "runner.seed=1,2", SPACE[1]]
    assert main([*words, "--multirun", f"runner.output_dir={tmp_path}"]) == 0
    assert "3 trials, 2 runs each; each of them can begin" in capsys.readouterr().out
    assert main(words) == 2
    assert "give --multirun, too" in capsys.readouterr().err


def test_mistakes_in_the_space_come_before_the_first_trial(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_sweep(plan(tmp_path, "actor.optim.lr=interval(-1,1)"), ())
    assert caught.value.problems[0].startswith("run lr--1.0: actor.optim.lr: ")
    # A key of whole numbers takes 4.0, but not what lies between.
    with pytest.raises(ConfigError, match="algorithm.group_size"):
        check_sweep(plan(tmp_path, "algorithm.group_size=interval(4,8)"), ())
    check_sweep(plan(tmp_path, "algorithm.group_size=int(interval(4,8))", *SPACE[:1]), ())


def test_a_study_that_is_killed_goes_on_with_the_same_trials(tmp_path):
    sweep = plan(tmp_path, "runner.seed=1,2", *SPACE, trials=4)
    accuracies = {0: (0.2, 0.4), 1: (0.6, 0.3), 2: (0.1, 0.1), 3: (0.5, 0.1)}

    def search(folder, reopens: bool) -> list[dict[str, str]]:
        """Run all trials; returns their values."""
        folder.mkdir()
        sweep = plan(folder, "runner.seed=1,2", *SPACE, trials=4)
        study, values = open_study(sweep), []
        while run := study.next_run():
            values.append(run.values)
            # One validation is better than the last one, and the second seed is worse by 0.1.
            second = 0.1 * (run.values["runner.seed"] == "2")
            finish(sweep, run, *(value - second for value in accuracies[run.trial]))
            study = open_study(sweep) if reopens else study
            if not reopens:
                study.record_end(run, is_failed=False)
        assert study.next_run() is None
        assert [trial.value for trial in study.trials()] == pytest.approx([0.35, 0.55, 0.05, 0.45])
        assert "4 of 4 trials are complete; the best is trial 1 with val/accuracy 0.5500: " in (
            study.summary()
        )
        return values

    assert search(tmp_path / "a", reopens=False) == search(tmp_path / "b", reopens=True)
    # Of a study killed while a trial was under way, its runs that are not done are left.
    study = open_study(sweep)
    first, second = study.next_run(), study.next_run()
    finish(sweep, first, 0.5)
    study = open_study(sweep)
    assert study.n_left == 7 and study.next_run() == second
    assert study.next_run().trial == 1
    # One killed while it asked leaves a trial without values, which does not count.
    study._study.ask()
    study = open_study(sweep)
    assert study.n_left == 7 and len(study.trials()) == 2
    assert [study.next_run().trial for _ in range(4)] == [0, 1, 1, 3]


def test_a_trial_with_a_failed_run_has_no_value_and_the_search_goes_on(tmp_path):
    sweep = plan(tmp_path, "runner.seed=1,2", *SPACE, trials=3)
    study = open_study(sweep)
    failed = study.next_run()
    finish(sweep, failed, 0.9, state="failed")
    study.record_end(failed, is_failed=True)  # its second seed is left out
    for accuracy in (0.3, 0.5):
        for _ in range(2):
            run = study.next_run()
            finish(sweep, run, accuracy)
            study.record_end(run, is_failed=False)
    assert study.next_run() is None
    assert "2 of 3 trials are complete" in study.summary()
    # Failed trials are not run again; a larger number of trials goes on with the study.
    assert open_study(sweep).n_left == 0
    longer = plan(tmp_path, "runner.seed=1,2", *SPACE, trials=4)
    check_sweep(longer, ())
    assert open_study(longer).next_run().name == "trial-003_seed-1"
    with pytest.raises(ConfigError, match='has a sweep with objective "val/accuracy"'):
        check_sweep(plan(tmp_path, "runner.seed=1,2", *SPACE, objective="reward/mean"), ())

    # The report and the table of runs have the best trial first, those without a value last.
    axes, members = read_sweep(sweep.folder)
    assert axes == ["trial", "actor.optim.lr", "algorithm.group_size", "runner.seed"]
    settings = group_by_setting(axes, members, trials_in(read_sweep_file(sweep.folder)))
    assert [setting.values[0] for setting in settings] == ["2", "1", "0", "3"]
    assert [setting.trial.objective for setting in settings] == [0.5, 0.3, None, None]
    page = build_sweep_report(sweep.folder).read_text()
    assert "4 trials, 8 runs, 4 of them done" in page and "highest val/accuracy" in page
    lines = read_folder(sweep.folder)
    assert [line.run for line in lines][::2] == [
        "trial-002_seed-1",
        "trial-001_seed-1",
        "trial-000_seed-1",
    ]
    table = runs_table(lines).splitlines()
    assert table[0].split()[:3] == ["run", "state", "objective"]
    assert table[1].split()[:3] == ["trial-002_seed-1", "done", "0.500"]
    assert "actor.optim.lr=" in table[1] and "algorithm.group_size=" in table[1]
