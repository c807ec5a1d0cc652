"""Whole runs, as a user starts them: real Ray, two FSDP2 ranks, one rollout worker, files on disk."""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from whole_run import FIXED_METRICS, LOCAL, Run

pytestmark = pytest.mark.e2e


def train(folder: Path, *overrides: str, expect: int = 0) -> str:
    """`python -m rlinf_vl train toy-grpo-cpu …`; what it wrote to the terminal."""
    command = [
        sys.executable,
        "-m",
        "rlinf_vl",
        "train",
        "toy-grpo-cpu",
        f"runner.output_dir={folder}",
        *overrides,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(folder: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / "toy-grpo-cpu/metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps at temperature 0.7 with everything on: reference KL, two mini-batches, checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    train(
        folder,
        "runner.max_steps=3",
        "runner.val_check_interval=2",
        "runner.save_interval=2",
        "data.val_samples=40",
        "algorithm.sampling_params.temperature=0.7",
        "algorithm.kl_beta=0.01",
        "algorithm.n_minibatches=2",
        "runner.max_tokens_per_mbs=1000",
        "runner.trajectories.groups=-1",
    )
    return folder


@pytest.mark.quick
def test_metrics_have_their_fixed_names(run):
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row.keys() >= FIXED_METRICS | {"actor/ref_kl"}
        assert all(value is not None for value in row.values())
    assert [row["step"] for row in rows if "val/accuracy" in row] == [0, 2, 3]
    assert [row["step"] for row in rows if "time/checkpoint" in row] == [2, 3]


@pytest.mark.quick
def test_engine_and_trainer_agree_at_temperature_07(run):
    for row in metrics(run)[1:]:
        assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5
        assert 0 < row["actor/rollout_train_abs_diff_max"] <= 2e-4
        assert abs(row["actor/rollout_train_kl"]) <= 1e-5


@pytest.mark.quick
def test_weights_are_versioned_and_move(run):
    rows = metrics(run)[1:]
    assert [(row["rollout/weight_version_min"], row["rollout/weight_version_max"]) for row in rows] == [
        (0, 0), (1, 1), (2, 2)
    ]  # fmt: skip
    assert rows[0]["actor/grad_norm"] > 0


@pytest.mark.quick
def test_the_runs_folder_is_complete(run):
    folder = run / "toy-grpo-cpu"
    assert "experiment_name: toy-grpo-cpu" in (folder / "config.yaml").read_text()
    assert list((folder / "tensorboard").glob("events.*"))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "global_step_2",
        "global_step_3",
    ]


@pytest.mark.quick
def test_trajectories_are_what_was_sampled_and_trained_on(run):
    folder = run / "toy-grpo-cpu"
    table = pd.read_parquet(folder / "trajectories")
    assert {(s, step): len(part) for (s, step), part in table.groupby(["split", "step"])} == {
        ("val", 0): 40, ("val", 2): 40, ("val", 3): 40,
        ("train", 1): 128, ("train", 2): 128, ("train", 3): 128,
    }  # fmt: skip
    for images in table.images:
        (path,) = images
        assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == Path(path).stem
    assert (table.tokens.map("".join).str.removesuffix("<|im_end|>") == table.response).all()
    assert (
        table.prompt.str.count("<image>").eq(1).all()
        and not table.prompt.str.contains("image_pad").any()
    )
    train, val = table[table.split == "train"], table[table.split == "val"]
    assert val.train_logprobs.isna().all() and val.advantage.isna().all()
    rows = {row["step"]: row for row in metrics(run)}
    for step, part in train.groupby("step"):
        pairs = zip(part.rollout_logprobs, part.train_logprobs, strict=True)
        differences = np.concatenate([np.abs(a - b) for a, b in pairs])
        assert np.isfinite(differences).all()
        assert differences.mean() == pytest.approx(
            rows[step]["actor/rollout_train_abs_diff_mean"], rel=1e-3
        )
        assert differences.max() == pytest.approx(rows[step]["actor/rollout_train_abs_diff_max"])
        assert part.reward.mean() == pytest.approx(rows[step]["reward/mean"])
        groups = part.groupby("group_id")
        expected = (part.reward - groups.reward.transform("mean")) / (
            groups.reward.transform("std") + 1e-6
        )
        assert part.advantage.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-4)
        assert all((versions == step - 1).all() for versions in part.weight_versions)
    for step, part in val.groupby("step"):
        assert part.correct.mean() == pytest.approx(rows[step]["val/accuracy"])
    assert (folder / "report.html").stat().st_size > 100_000


def test_an_evaluation_of_its_checkpoint_finds_what_the_run_found(run, tmp_path):
    """The first sample of a problem is drawn as a validation draws it."""
    command = [
        sys.executable,
        "-m",
        "rlinf_vl",
        "eval",
        "toy-grpo-cpu",
        f"runner.output_dir={tmp_path}",
    ]
    asked = [
        "data.val_samples=40",
        f"checkpoint={run / 'toy-grpo-cpu'}",
        "--samples",
        "2",
        "--by",
        "answer",
    ]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "toy-grpo-cpu-step_3-eval"
    made = json.loads((folder / "eval.json").read_text())
    table = pd.read_parquet(folder / "trajectories")
    assert len(table) == 80 and table.correct.mean() == pytest.approx(made["pass@1"]["mean"])
    best = table.groupby("problem_id").correct.max()
    assert best.mean() == pytest.approx(made["pass@2"]["mean"]) and len(best) == 40
    assert table[table["sample"] == 0].correct.mean() == pytest.approx(
        metrics(run)[-1]["val/accuracy"]
    )
    assert sum(part["pass@1"]["problems"] for part in made["tables"]["answer"].values()) == 40
    assert "| all |" in done.stdout and made["checkpoint"].endswith("global_step_3")
    assert all((folder / path).is_file() for images in table.images for path in images)
    assert sorted(path.name for path in folder.glob(".*")) == [], "the exported weights are gone"
    report = subprocess.run(
        [sys.executable, "-m", "rlinf_vl", "report", str(folder)], capture_output=True, text=True
    )
    assert report.returncode == 0 and (folder / "report.html").stat().st_size > 50_000, (
        report.stderr
    )


def test_export_loads_in_transformers_and_moved_from_the_start(run, tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

    out = tmp_path / "exported"
    command = [
        sys.executable,
        "-m",
        "rlinf_vl",
        "export",
        str(run / "toy-grpo-cpu"),
        str(out),
        "--dtype",
        "fp32",
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    trained = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).state_dict()
    start = AutoModelForImageTextToText.from_pretrained(
        toy_checkpoint_path(), dtype=torch.float32
    ).state_dict()
    assert trained.keys() == start.keys()
    moved = {name for name in trained if not torch.equal(trained[name], start[name])}
    assert any("language_model.layers" in name for name in moved)
    assert (out / "preprocessor_config.json").exists() and (out / "chat_template.jinja").exists()
    assert AutoTokenizer.from_pretrained(out).eos_token_id is not None
    (new := tmp_path / "new").mkdir()
    (new / "file").touch()
    usual = {path.is_dir(): path.stat().st_mode for path in (new, new / "file")}
    unusual = [
        path
        for top in (run, out)
        for path in top.rglob("*")
        if path.stat().st_mode != usual[path.is_dir()]
    ]
    assert not unusual, "whoever may read other files may read those of a run and of an export"


@pytest.mark.quick
def test_resume_auto_goes_on_where_it_stopped(run):
    before = metrics(run)
    output = train(
        run,
        "runner.max_steps=5",
        "runner.resume_dir=auto",
        "runner.val_check_interval=-1",
        "algorithm.n_minibatches=1",
        LOCAL,  # in one process what two ranks have saved: half of the time is Ray's start
    )
    assert "resumed from" in output
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[: len(before)] == before
    assert [row["rollout/weight_version_min"] for row in rows[-2:]] == [3, 4]


def test_reward_climbs(tmp_path):
    train(
        tmp_path, "runner.max_steps=20", "runner.val_check_interval=20", "runner.save_interval=-1"
    )
    rows = metrics(tmp_path)
    assert rows[-1]["val/accuracy"] > rows[0]["val/accuracy"] + 0.15
    assert max(row["actor/rollout_train_abs_diff_mean"] for row in rows[1:]) <= 2e-5


def test_real_geometry_runs_through(tmp_path, geo3k_dir):
    train(
        tmp_path,
        f"data.train_data_paths=[{geo3k_dir / 'train.parquet'}]",
        f"data.val_data_paths=[{geo3k_dir / 'test.parquet'}]",
        "runner.max_steps=2",
        "data.rollout_batch_size=8",
        "data.val_samples=16",
        LOCAL,
    )
    rows = metrics(tmp_path)
    assert len(rows) == 3 and rows[-1]["rollout/errors"] == 0
    assert max(row["actor/rollout_train_abs_diff_mean"] for row in rows[1:]) <= 2e-5


@pytest.mark.parametrize(
    "moment, number",
    [
        pytest.param("ray::", signal.SIGTERM, marks=pytest.mark.nightly),
        ("ray::RolloutRank", signal.SIGINT),
    ],
)
def test_a_run_that_is_told_to_stop_while_it_starts_leaves_no_process(tmp_path, moment, number):
    run = Run(tmp_path)
    run.until(lambda: run.actors(moment))
    run.process.send_signal(number)
    # while it connects to its first processes, Ray has signal handlers that end in an exit code of their own
    output = run.finish(expect=128 + number if moment != "ray::" else None, seconds=40)
    # a replacement that is made while Ray ends would start another cluster
    assert "is replaced" not in output
    assert not (run.folder / "metrics.jsonl").exists()


@pytest.mark.quick
def test_a_mistake_is_told_in_a_moment_before_ray_starts(tmp_path):
    output = train(tmp_path, "algorithm.grup_size=4", expect=2)
    assert "algorithm.grup_size" in output and "algorithm.group_size" in output
    assert not list(tmp_path.iterdir())
