"""`rlinf_vl.train` up to the start of the run: what is refused, and what a config becomes of objects. And `Run` on a folder."""

import json
import os
import signal
import subprocess
import sys
import threading

import datasets
import pandas as pd
import pytest
from PIL import Image

import rlinf_vl
from rlinf_vl.config import load_config
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.images import decode
from rlinf_vl.data.rows import RowFormat
from rlinf_vl.driver import entry
from rlinf_vl.envs.registry import load_env_class
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.runtime.stop_request import StopRequest


class Counting:
    """Pays for the number of letters."""

    def __init__(self, worth=0.5):
        self.worth = worth

    def start(self, problem):
        return list(problem.messages)

    def step(self, response):
        from rlinf_vl.envs import StepResult

        return StepResult([], self.worth * len(response), True, {})

    def close(self):
        pass


@pytest.fixture
def train(monkeypatch, tmp_path):
    """`rlinf_vl.train` on the toy in a folder of its own, with the config that it would run."""
    made = []
    monkeypatch.setattr(
        entry, "launch_training", lambda config, stop, keep_ray: made.append(config)
    )
    monkeypatch.chdir(tmp_path)

    def call(overrides=None, *, start=rlinf_vl.train, config="toy-grpo-cpu", **given):
        folder = {"runner.output_dir": str(tmp_path / "out")}
        start(config, folder | dict(overrides or {}), **given)
        return made.pop()

    return call


def row(i, *colors):
    return {
        "problem": "<image>" * len(colors) + "which?",
        "answer": str(i),
        "images": [picture(c) for c in colors],
    }


def picture(color):
    return Image.new("RGB", (32, 40), color)


def test_importing_the_package_takes_nothing_with_it():
    slow = "{'torch', 'ray', 'hydra', 'numpy', 'pandas', 'datasets'} & set(sys.modules)"
    asked = "rlinf_vl.train, rlinf_vl.Run"
    program = f"import sys, rlinf_vl; print({slow}); {asked}; print({{'torch', 'ray'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["set()", "set()"], done.stderr
    assert {"train", "load_policy", "Run"} <= set(dir(rlinf_vl))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        rlinf_vl.trian  # noqa: B018


def test_rows_become_a_file_with_their_images(train):
    rows = [row(0, "red"), row(1, "green", "blue")]
    config = train(
        {"data.rollout_batch_size": 2},
        train_dataset=rows,
        val_dataset=datasets.Dataset.from_list(rows[:1]),
    )
    (path,) = config.data.train_data_paths
    problems = ProblemDataset([path], "train")
    assert [problem.answer for problem in map(problems.__getitem__, range(2))] == ["0", "1"]
    colors = [[decode(image).getpixel((3, 3)) for image in problems[i].images] for i in range(2)]
    assert colors == [[(255, 0, 0)], [(0, 128, 0), (0, 0, 255)]]
    assert len(ProblemDataset(config.data.val_data_paths, "val")) == 1
    assert train({"data.rollout_batch_size": 2}, train_dataset=rows).data.train_data_paths == [path]
    assert train(
        {"data.rollout_batch_size": 2}, train_dataset=pd.DataFrame(rows)
    ).data.train_data_paths == [path]
    assert len(os.listdir(os.path.dirname(path))) == 2, (
        "the same rows have the same file, and nothing else is left"
    )


def test_conversations_are_imitated_with_their_images(train):
    messages = [
        {"role": "user", "content": "<image>which?"},
        {"role": "assistant", "content": "red"},
    ]
    conversation = {"messages": messages, "images": [picture("red")]}
    overrides = {"data.rollout_batch_size": 1, "data.val_data_paths": [], "data.sample_val": False}
    config = train(
        overrides, start=rlinf_vl.sft, config="toy-sft-cpu", train_dataset=[conversation]
    )
    assert config.algorithm.loss_type == "cross_entropy" and config.runner.save_interval > 0
    form = RowFormat(messages_key="messages")
    (problem,) = ProblemDataset(config.data.train_data_paths, "train", form)
    assert decode(problem.images[0]).getpixel((3, 3)) == (255, 0, 0)
    assert [message.get("weight") for message in problem.messages] == [None, 1]
    with pytest.raises(ConfigError, match="data.prompt_suffix"):
        train(
            overrides | {"data.prompt_suffix": "."},
            start=rlinf_vl.sft,
            config="toy-sft-cpu",
            train_dataset=[conversation],
        )


def test_rows_of_trl_and_verl_are_given_as_they_are(train):
    parts = [{"type": "image", "image": picture("red")}, {"type": "text", "text": "x?"}]
    rows = [
        {
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": parts}],
            "solution": "3",
        },
        {"prompt": [{"role": "user", "content": "y?"}], "solution": "4"},
    ]
    config = train({"data.rollout_batch_size": 2}, train_dataset=rows)
    found = list(ProblemDataset(config.data.train_data_paths, "train"))
    assert [problem.answer for problem in found] == ["3", "4"] and [
        len(problem.images) for problem in found
    ] == [1, 0]
    assert [
        message["content"][-1]["text"] for problem in found for message in problem.messages
    ] == [
        "Think.",
        "x?",
        "y?",
    ]
    rows = [
        {
            "prompt": rows[1]["prompt"],
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "images": [picture("red")],
        }
    ]
    (problem,) = ProblemDataset(
        train({"data.rollout_batch_size": 1}, train_dataset=rows).data.train_data_paths, "train"
    )
    assert (
        problem.answer == "4"
        and len(problem.images) == 1
        and problem.columns["reward_model"] == rows[0]["reward_model"]
    )


def test_images_of_files_are_taken_along(train, tmp_path):
    picture("red").save(tmp_path / "a.png")
    table = datasets.Dataset.from_dict(
        {"problem": ["<image>?"], "answer": ["1"], "images": [[str(tmp_path / "a.png")]]}
    )
    table = table.cast_column("images", datasets.List(datasets.Image()))
    config = train({"data.rollout_batch_size": 1}, train_dataset=table)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigError, match="train_dataset: no file '.*a.png', which an image names"):
        train(train_dataset=table)
    assert not list((tmp_path / "out/datasets").glob(".*"))
    (image,) = ProblemDataset(config.data.train_data_paths, "train")[0].images
    assert decode(image).getpixel((0, 0)) == (255, 0, 0)


def test_paths_in_rows_are_relative_to_the_working_folder(train, tmp_path):
    picture("red").save(tmp_path / "a.png")
    rows = [{"problem": "<image>?", "answer": "1", "images": ["a.png"]}]
    config = train({"data.rollout_batch_size": 1}, train_dataset=rows, val_dataset=rows)
    assert config.data.image_root == str(tmp_path)
    assert train({"data.rollout_batch_size": 1}, train_dataset=rows).data.image_root == str(
        tmp_path
    ), "the toy names no file"
    datasets.Dataset.from_list([row(0, "red")]).to_parquet("own.parquet")
    bare = [{"problem": "?", "answer": "1", "images": []}]
    config = train({"data.rollout_batch_size": 1}, train_dataset=bare, val_dataset="own.parquet")
    assert config.data.image_root is None, "a file's own paths are relative to where it is"


def test_files_that_rows_name_are_relative_to_the_working_folder(train, tmp_path):
    for name in ("a.png", "b.png"):
        picture("red").save(tmp_path / name)
    rows = [
        {"problem": "<image><image>?", "answer": "1", "images": ["a.png", str(tmp_path / "b.png")]}
    ]
    alone = [{"problem": "<image>?", "answer": "1", "image": "a.png"}]
    cases = [({}, {"train_dataset": rows, "val_dataset": rows})]
    cases += [({"data.image_keys": ["image"], "data.val_data_paths": []}, {"train_dataset": alone})]
    for overrides, given in cases:
        (path,) = train({"data.rollout_batch_size": 1} | overrides, **given).data.train_data_paths
        problems = ProblemDataset(
            [path], "train", RowFormat(image_keys=overrides.get("data.image_keys", ["images"]))
        )
        assert {decode(image).getpixel((0, 0)) for image in problems[0].images} == {(255, 0, 0)}
    with pytest.raises(ConfigError, match="gone.png"):
        train(
            {"data.rollout_batch_size": 1},
            train_dataset=[{"problem": "<image>?", "answer": "1", "images": ["gone.png"]}],
        )


def test_paths_and_names_are_taken_as_they_are(train, tmp_path):
    datasets.Dataset.from_list([row(0, "red")] * 16).to_parquet(str(tmp_path / "own.parquet"))
    assert train(train_dataset=tmp_path / "own.parquet").data.train_data_paths == [
        str(tmp_path / "own.parquet")
    ]
    assert train(val_dataset=["toy", "own.parquet"]).data.val_data_paths == [
        "toy",
        str(tmp_path / "own.parquet"),
    ]


@pytest.mark.slow
def test_a_class_travels_in_the_config(train, tmp_path):
    config = train(env=Counting)
    from rlinf_vl.config import save_config

    save_config(config, tmp_path / "config.yaml")
    again = load_config(str(tmp_path / "config.yaml"))
    cls = load_env_class(again.rollout.env_class, again.runner.code_files)
    assert cls(worth=2).step("abc").reward == 6
    assert train(env="maze").rollout.env_class == "maze"


@pytest.mark.slow
def test_overrides_are_texts_or_a_mapping(train):
    overrides = {
        "runner": {"max_steps": 7, "seed": 5},
        "rollout.env_kwargs.worth": 3,
        "data.image_keys": ["images"],
    }
    config = train(overrides, env=Counting)
    assert (config.runner.max_steps, config.runner.seed, config.rollout.env_kwargs) == (
        7,
        5,
        {"worth": 3},
    )
    assert config.runner.save_interval == 40 and config.runner.val_check_interval == 10
    assert train({"runner.save_interval": -1}).runner.save_interval > 10**6, (
        "the last step is saved"
    )


@pytest.mark.parametrize(
    ("overrides", "given", "says"),
    [
        ({"runner.max_step": 3}, {}, "did you mean 'runner.max_steps'"),
        ({"runner.max_steps": "many"}, {}, "runner.max_steps: 'many' is not an integer"),
        ({}, {"env": int}, "int has no start"),
        ({}, {"train_dataset": []}, "train_dataset: has no rows"),
        ({}, {"train_dataset": 7}, "a value of type int is no datasets.Dataset, DataFrame"),
        ({}, {"train_dataset": datasets.DatasetDict()}, "train_dataset=DatasetDict[…]"),
        ({}, {"train_dataset": [{"problem": "a", "answer": 1}, {"problem": {}, "answer": 2}]}, "make no table"),
        ({}, {"train_dataset": [{"question": "a", "answer": "1", "images": []}] * 16}, "column 'problem' not in"),
        ({}, {"train_dataset": [row(0, "red")]}, "data.rollout_batch_size: 16 problems a step"),
        ({}, {"val_dataset": "gone.parquet"}, "gone.parquet"),
    ],
)  # fmt: skip
def test_what_is_refused(train, overrides, given, says):
    with pytest.raises(ConfigError, match=".*") as error:
        train(overrides, **given)
    assert says in str(error.value)


def test_what_can_not_travel_is_refused(train):
    lock = threading.Lock()

    class Locked(Counting):
        held = lock

    with pytest.raises(ConfigError, match="env: Locked: can't travel to the workers"):
        train(env=Locked)


def test_a_run_by_its_folder(tmp_path):
    lines = [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5, "val/accuracy": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("runner: {max_steps: 2}\n")
    run = rlinf_vl.Run(str(tmp_path))
    assert isinstance(run.metrics, pd.DataFrame) and run.metrics.index.name == "step"
    assert run.metrics["reward/mean"].to_dict() == {1: 0.25, 2: 0.5}
    assert run.metrics["val/accuracy"].isna().to_dict() == {1: True, 2: False}
    assert (
        run.report() == tmp_path / "report.html"
        and run.report(output=tmp_path / "x.html").is_file()
    )
    with pytest.raises(RunError, match="set runner.save_interval"):
        _ = run.model_path
    empty = rlinf_vl.Run(tmp_path / "none")
    assert empty.metrics.empty and empty.metrics.index.name == "step" and empty.state == ""


def test_signals_mean_what_they_meant_before():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop = StopRequest()
    with stop.installed():
        assert signal.getsignal(signal.SIGINT) == stop._receive
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    # Where no handler can be set.
    thread = threading.Thread(target=lambda: stop.installed().__enter__())
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
