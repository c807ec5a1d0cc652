"""A rollout worker in this process: whose fault a failure is, what an answer without a verdict is paid, and that every
environment is closed."""

import asyncio
import json
from concurrent.futures import Future

import numpy as np
import pytest
import ray

from rlinf_vl.config import load_config
from rlinf_vl.data.bad_rows import BadRows, TooManyFaults, check_faults
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.envs import ENVIRONMENTS, StepResult
from rlinf_vl.observe.metrics import summarize_rollout
from rlinf_vl.rewards import GradingTimeout, stop_grading
from rlinf_vl.rollout.worker import RolloutRank, Task

TOWER = "9^{9^{9^{9}}}"
ROWS = [("What is 6 × 7?", "42"), ("And this?", TOWER), ("And this?", r"\sqrt{2}"), ("And that?", r"\boxed{6")]


class Watched:
    """An environment that does what its class says, and remembers who was made, started and closed."""

    made: list["Watched"] = []
    fails: str | None = None
    differ = False

    def __init__(self, *, grade, reward_max, reward_min):
        self.grade, self.number = grade, len(self.made)
        self.calls = ["init"]
        self.made.append(self)

    def _call(self, name):
        self.calls.append(name)
        if self.fails == name and self.number % 2:
            raise OSError(f"no {name} today")

    def start(self, problem):
        self._call("start")
        self.answer = problem.answer
        text = f"case {self.number}" if self.differ else "case"
        return [{"role": "user", "content": [{"type": "text", "text": text}]}]

    def step(self, response):
        self._call("step")
        return StepResult((), 1.0, done=True, info={"correct": True})

    def close(self):
        self._call("close")


@pytest.fixture(scope="module")
def rank(tmp_path_factory, toy_folder):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": p, "answer": a, "images": []}) + "\n" for p, a in ROWS))
    overrides = [
        f"data.train_data_paths=[{path}]",
        "data.val_data_paths=[]",
        "algorithm.sampling_params.max_new_tokens=3",
    ]
    rank = RolloutRank(load_config("toy-grpo-cpu", [*overrides, "reward.reward_min_val=-0.5"]), str(toy_folder), "cpu")
    yield rank
    asyncio.run(rank.stop())
    stop_grading()


@pytest.fixture(autouse=True)
def _store(rank, monkeypatch):
    """Groups stay in this process: no Ray is needed to see them."""
    groups = {}
    monkeypatch.setattr(rank.store, "put", lambda group, own_images: (groups.setdefault(group.id, group), 0))


@pytest.fixture
def watched(rank, monkeypatch):
    class Fresh(Watched):
        made = []

    monkeypatch.setitem(ENVIRONMENTS, "watched", Fresh)
    monkeypatch.setattr(rank.config.rollout, "env_class", "watched")
    return Fresh


def generate(rank, *tasks):
    async def run():
        return [result async for result in rank.generate(tasks)]

    return asyncio.run(run())


def only(rank, row=0, n=4):
    ((summary, group),) = generate(rank, Task("g", "train", row, tuple(range(n))))
    return summary, group


def all_closed_once(env_class, n=4):
    return len(env_class.made) == n and all(
        env.calls.count("close") == 1 and env.calls[-1] == "close" for env in env_class.made
    )


def test_an_answer_without_a_verdict_is_wrong_and_no_bad_row(rank, monkeypatch, tmp_path):
    def grade(response, answer):
        raise GradingTimeout("no verdict in 0.5 s")

    monkeypatch.setattr(rank, "grade", grade)
    summary, group = only(rank)
    assert summary.errors == (None,) * 4 and summary.correct == (False,) * 4
    assert summary.rewards == (-0.5,) * 4 and summary.ungradable == 4
    assert all(t.reward_parts == {"ungradable": 1.0} for t in group.trajectories)
    bad = BadRows(tmp_path, 0.0, {"train": 4})
    bad.add_failed("train", [summary], 1)
    bad.check()
    metrics = summarize_rollout([summary], 1.0)
    assert metrics["reward/ungradable"] == 4 and metrics["reward/accuracy"] == 0 and metrics["rollout/errors"] == 0


def test_a_tower_of_powers_in_a_box_is_a_wrong_answer(rank, monkeypatch):
    monkeypatch.setattr(rank.processor, "decode", lambda ids: rf"\boxed{{{TOWER}}}")
    summary, _ = only(rank, n=2)
    assert summary.errors == (None, None) and summary.ungradable == 2 and summary.rewards == (-0.5, -0.5)


def test_a_reference_that_cannot_be_graded_is_the_rows_fault_and_found_by_the_filter(rank):
    found, _ = asyncio.run(rank.filter_rows("train", range(len(ROWS))))
    assert found.kept == [0, 2]
    assert {row: bad.kind for row, bad in found.bad.items()} == {1: "answer unusable", 3: "answer unusable"}
    assert TOWER in found.bad[1].reason


def test_the_engines_failure_is_not_the_rows(rank, watched, monkeypatch, tmp_path):
    def submit(requests):
        futures = [Future() for _ in requests]
        for future in futures:
            future.set_exception(TimeoutError("not answered within 600 s"))
        return futures

    monkeypatch.setattr(rank.engine, "submit", submit)
    summary, _ = only(rank)
    assert summary.errors == ("engine: TimeoutError: not answered within 600 s",) * 4
    bad = BadRows(tmp_path, 0.0, {"train": 4})
    bad.add_failed("train", [summary], 1)
    bad.check()
    metrics = summarize_rollout([summary], 1.0)
    assert (metrics["rollout/errors"], metrics["rollout/engine_errors"], metrics["rollout/env_errors"]) == (4, 4, 0)
    with pytest.raises(TooManyFaults, match=r"4 of 4 .*4 × engine: TimeoutError.*rollout\.request_timeout"):
        check_faults([summary])
    assert all_closed_once(watched)


@pytest.mark.parametrize("fails", [None, "start", "step", "close"])
def test_every_environment_is_closed_whatever_fails(rank, watched, fails):
    watched.fails = fails
    summary, _ = only(rank)
    failed = {None: 0, "start": 4, "step": 2, "close": 0}[fails]
    assert len([e for e in summary.errors if e]) == failed
    assert all(
        e is None or e.startswith("environment: 'watched' ") and f"no {fails} today" in e for e in summary.errors
    )
    made = 4 if fails != "start" else len(watched.made)
    assert all_closed_once(watched, made)
    assert summarize_rollout([summary], 1.0)["rollout/env_errors"] == failed


def test_environments_are_closed_where_the_prompt_fails(rank, watched, monkeypatch):
    monkeypatch.setattr(rank.config.data, "max_prompt_length", 1)
    summary, _ = only(rank)
    assert all(e.startswith("prompt too long: ") for e in summary.errors) and all_closed_once(watched)


def test_environments_are_closed_where_the_engine_dies(rank, watched, monkeypatch):
    died, pending = Future(), Future()
    died.set_exception(RuntimeError("gone"))
    monkeypatch.setattr(rank.engine, "submit", lambda requests: [died, pending])
    monkeypatch.setattr(rank.engine, "alive", lambda timeout_s: False)
    with pytest.raises(EngineDied, match="gone"):
        generate(rank, Task("a", "train", 0, (1, 2)), Task("b", "train", 0, (3, 4)))
    assert all_closed_once(watched)


def test_starts_that_differ_within_a_group_are_refused_by_name(rank, watched):
    watched.differ = True
    summary, _ = only(rank)
    assert all(e.startswith("environment: 'watched' began the 4 ") and "problem.id" in e for e in summary.errors)
    assert all_closed_once(watched)
    watched.made.clear()
    alone, _ = only(rank, n=1)
    assert alone.errors == (None,)


@pytest.mark.parametrize("said", [None, 7, "case", ["case"], [{"role": "user", "content": [{"type": "image_url"}]}]])
def test_what_start_says_is_no_fault_of_the_row(rank, watched, monkeypatch, said):
    monkeypatch.setattr(watched, "start", lambda self, problem: said)
    summary, _ = only(rank)
    assert all(e.startswith("environment: 'watched' ") for e in summary.errors), summary.errors
    assert all_closed_once(watched)


def test_messages_of_a_generator_are_read_once(rank, watched, monkeypatch):
    monkeypatch.setattr(watched, "start", lambda self, problem: iter(problem.messages))
    summary, _ = only(rank)
    assert summary.errors == (None,) * 4


def test_parts_of_a_reward_are_recorded_as_plain_numbers(rank, watched, monkeypatch):
    parts = {"format": np.float32(0.5)}
    monkeypatch.setattr(watched, "step", lambda self, _: StepResult((), 1.0, True, {"reward_parts": parts}))
    assert json.dumps([t.reward_parts for t in only(rank)[1].trajectories]) == json.dumps([{"format": 0.5}] * 4)
    parts["format"] = "half"
    summary, group = only(rank)
    assert all(e.startswith("environment: 'watched' failed: ValueError") for e in summary.errors)
    assert summary.rewards == (0.0,) * 4


def test_few_faults_are_told_and_many_end_the_run(rank, watched):
    watched.fails = "step"
    summary, _ = only(rank)  # two of four
    told = check_faults([summary])
    assert told is not None and "2 of 4" in told and "2 × environment: 'watched' failed: OSError: no step today" in told
    assert check_faults([]) is None
    assert not ray.is_initialized()
