"""A rollout worker in this process: which rows it can use, and groups from rows, engine and grader together."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest
import ray
from summaries import values

from rlinf_vl.config import load_config
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.observe.metrics import summarize_rollout
from rlinf_vl.rewards import stop_grading
from rlinf_vl.rollout.episode.player import Player
from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.rollout.submission import Task
from rlinf_vl.transport.groups import GroupStore

TOWER = "9^{9^{9^{9}}}"
ROWS = [
    ("What is 6 × 7?", "42"),
    ("And this?", TOWER),
    ("And this?", r"\sqrt{2}"),
    ("And that?", r"\boxed{6"),
]


@pytest.fixture(scope="module")
def rank(tmp_path_factory, toy_folder):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"problem": p, "answer": a, "images": []}) + "\n" for p, a in ROWS)
    )
    overrides = [
        f"data.train_data_paths=[{path}]",
        "data.val_data_paths=[]",
        "algorithm.sampling_params.max_new_tokens=3",
        "reward.reward_min_val=-0.5",
    ]
    rank = RolloutRank(load_config("toy-grpo-cpu", overrides), str(toy_folder), "cpu")
    yield rank
    asyncio.run(rank.stop())
    stop_grading()


@pytest.fixture(autouse=True)
def _store(monkeypatch):
    """Groups stay in this process: no Ray is needed to see them."""
    groups = {}
    put = lambda store, group, own_images: (groups.setdefault(group.id, group), 0)  # noqa: E731
    monkeypatch.setattr(GroupStore, "put", put)


def generate(rank, *tasks):
    async def run():
        return {
            summary.id: (summary, group)
            async for finished in rank.generate(tasks)
            for summary, group in finished
        }

    return asyncio.run(run())


def test_rows_are_answered_and_one_that_can_not_be_read_is_a_group_with_the_reason(
    rank, monkeypatch
):
    class Rows(list):
        def __getitem__(self, i):
            if i == 2:
                raise OSError("disk gone")
            return rank_dataset[i]

        def problem(self, i, draw):
            return self[i]

        def row_id(self, i):
            return f"rows:{i}"

    rank_dataset = rank.datasets["train"]
    monkeypatch.setitem(rank.datasets, "train", Rows())
    found = generate(rank, *(Task(f"g{i}", "train", i, (i, 7)) for i in (0, 2, 3)))
    assert not ray.is_initialized()
    summaries = [summary for summary, _ in found.values()]
    assert summarize_rollout(summaries, 1.0)["rollout/prefill_ratio"] == 1
    assert [values(s, "error") for s, _ in found.values()].count(("OSError: disk gone",) * 2) == 1
    assert found["g2"][0].problem_id == "rows:2" and values(found["g2"][0], "tokens") == (0, 0)
    busy, passed = (sum(s.engine_seconds[k] for s, _ in found.values()) for k in (0, 1))
    assert 0 < busy <= passed
    for name in ("g0", "g3"):
        summary, group = found[name]
        assert values(summary, "error") == (None, None) and all(
            0 < n <= 3 for n in values(summary, "response_tokens")
        )
        assert group.answer == dict(enumerate(a for _, a in ROWS))[int(name[1])]


def test_faults_are_penalized_in_training_only(rank, monkeypatch):
    """A validation counts what its environment failed, whatever becomes of it in training."""

    class Failing:
        def start(self, problem):
            return problem.messages

        def step(self, response):
            raise OSError("the simulator crashed")

        def close(self):
            pass

    monkeypatch.setitem(rank.datasets, "val", rank.datasets["train"])
    settings = replace(rank.player.settings, penalize_faults=True)
    player = Player(rank.player.client, rank.player.builder, FailingMaker(Failing), settings)
    monkeypatch.setattr(rank, "player", player)
    groups = generate(
        rank, Task("trained", "train", 0, (1, 2)), Task("validated", "val", 0, (1, 2))
    )
    trained, validated = groups["trained"][0], groups["validated"][0]
    assert (
        values(trained, "error") == (None, None)
        and all(values(trained, "penalized"))
        and values(trained, "reward") == (-0.5, -0.5)
    )
    assert len([error for error in values(validated, "error") if "simulator crashed" in error]) == 2
    assert not any(values(validated, "penalized"))


class FailingMaker:
    """Makes environments of one class, for every problem."""

    def __init__(self, env_class):
        self.env_class = env_class

    def __call__(self, problem, seed, group_seed):
        return self.env_class()

    def name_of(self, problem):
        return "failing"


@pytest.mark.slow
def test_a_tower_of_powers_in_a_box_is_a_wrong_answer(rank, monkeypatch):
    monkeypatch.setattr(rank.processor, "decode", lambda ids: rf"\boxed{{{TOWER}}}")
    summary, _ = generate(rank, Task("g", "train", 0, (1, 2)))["g"]
    assert (
        all(error.startswith("ungradable: math: no verdict") for error in values(summary, "error"))
        and sum(values(summary, "ungradable")) == 2
        and not any(values(summary, "correct"))
    )


@pytest.mark.slow
def test_a_reference_that_cannot_be_graded_is_the_rows_fault_and_found_by_the_filter(rank):
    found, _ = asyncio.run(rank.filter_rows("train", range(len(ROWS))))
    assert list(found.kept) == [0, 2]
    assert {row: bad.kind for row, bad in found.bad.items()} == {
        1: "answer unusable",
        3: "answer unusable",
    }
    assert TOWER in found.bad[1].reason


@pytest.mark.slow
def test_functions_of_a_file_see_the_row_and_what_was_sampled(tmp_path, toy_folder):
    """The file is gone when the worker reads it: its text has come with the config."""
    code = tmp_path / "own.py"
    code.write_text(
        "def ours(response, answer, *, kind, response_tokens, truncated, base=0.0, **row):\n"
        "    return {'score': base + (kind == 'sum'), 'tokens': response_tokens, 'cut': truncated, 'level': row['level']}\n"
        "def theirs(prompts, completions, level, **kwargs):\n"
        "    return [len(prompts) + one for one in level]\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"problem": "1 + 1?", "answer": "2", "images": [], "kind": "sum", "level": 3})
        + "\n"
    )
    config = load_config(
        "toy-grpo-cpu",
        [
            f"data.train_data_paths=[{rows}]", "data.val_data_paths=[]", "algorithm.sampling_params.max_new_tokens=3",
            "reward.timeout=60", f"reward.functions=[{{function: math}}, {{function: {code}:ours, weight: 0.5, "
            f"kwargs: {{base: 0.25}}}}, {{function: {code}:theirs, weight: 0.1}}]",
        ],
    )  # fmt: skip
    code.unlink()
    rank = RolloutRank(config, str(toy_folder), "cpu")
    try:
        summary, group = generate(rank, Task("g", "train", 0, (1, 2, 3)))["g"]
    finally:
        asyncio.run(rank.stop())
    assert values(summary, "error") == (None,) * 3 and not any(values(summary, "ungradable"))
    for t, tokens in zip(group.trajectories, values(summary, "response_tokens"), strict=True):
        own = {"ours.tokens": tokens, "ours.cut": float(t.status == "length"), "ours.level": 3.0}
        assert t.reward_parts == {"math": float(t.correct), "ours": 1.25, "theirs": 6.0} | own
        assert t.reward == pytest.approx(t.correct + 0.5 * 1.25 + 0.1 * 6)
    assert summarize_rollout([summary], 1.0)["reward/theirs"] == 6.0


@pytest.mark.parametrize("max_concurrent", [None, 8])
def test_groups_cancelled_before_their_environments_are_open_are_not_sampled(
    rank, monkeypatch, max_concurrent
):
    """And groups of the same names that are asked for later are another matter."""
    sampled, problem, submit = [], rank._problem, rank.engine.submit
    reading, may_read = threading.Event(), threading.Event()

    def read(task):
        reading.set()
        assert may_read.wait(60)
        return problem(task)

    def note(requests):
        sampled.extend(request.seeds for request in requests)
        return submit(requests)

    monkeypatch.setattr(rank, "_problem", read)
    monkeypatch.setattr(rank.engine, "submit", note)
    rollout = replace(rank.config.rollout, max_concurrent_rollouts=max_concurrent)
    monkeypatch.setattr(rank, "config", replace(rank.config, rollout=rollout))

    async def answer_batch(*names):
        tasks = [Task(name, "train", 0, (number,)) for number, name in enumerate(names)]
        return [summary.id async for finished in rank.generate(tasks) for summary, _ in finished]

    async def run():
        first = asyncio.ensure_future(answer_batch("a", "b"))
        await asyncio.to_thread(reading.wait, 60)
        await rank.cancel(["b", "no such group"])
        second = asyncio.ensure_future(answer_batch("b"))
        await asyncio.sleep(0)
        may_read.set()
        return await first, await second

    assert asyncio.run(run()) == (["a"], ["b"])
    assert sampled == [(0,), (0,)] and rank.open_batches == []


def test_an_engine_that_takes_no_requests_is_dead(rank, monkeypatch):
    def submit(requests):
        raise RuntimeError("closed")

    monkeypatch.setattr(rank.engine, "submit", submit)
    with pytest.raises(EngineDied, match="it takes no requests: closed"):
        generate(rank, Task("g", "train", 0, (1, 2)))


WALK = """
import time
from rlinf_vl.envs import StepResult

time.sleep(3.5)  # longer than a turn may take

class Walk:
    open = 0

    def __init__(self, *, seed, group_seed, hangs):
        self.seed, self.group_seed, self.hangs = seed, group_seed, hangs
        Walk.open += 1
        assert Walk.open <= 2, "more are under way than rollout.max_concurrent_rollouts"

    async def start(self, problem):
        return [*problem.messages, {"role": "user", "content": f"walk {self.group_seed}"}]

    def step(self, response):
        if self.seed in self.hangs:
            Walk.open -= 1  # nobody waits for it
            time.sleep(600)
        return StepResult([{"role": "user", "content": "on"}], 0.5, False, {"metrics": {"seed": self.seed}})

    def close(self):
        Walk.open -= 1
"""


@pytest.mark.slow
def test_an_environment_from_a_file_is_played_within_its_limits(tmp_path, toy_folder):
    rows, walk = tmp_path / "rows.jsonl", tmp_path / "walk.py"
    rows.write_text(
        "".join(json.dumps({"problem": p, "answer": "1", "images": []}) + "\n" for p, _ in ROWS)
    )
    walk.write_text(WALK)
    overrides = [
        f"data.train_data_paths=[{rows}]",
        "data.val_data_paths=[]",
        "algorithm.sampling_params.max_new_tokens=3",
        f"rollout.env_class={walk}:Walk",
        "rollout.env_kwargs={hangs: [7]}",
        "rollout.max_turns=2",
        "rollout.max_concurrent_rollouts=2",
        "rollout.turn_timeout=3",
    ]
    rank = RolloutRank(load_config("toy-grpo-cpu", overrides), str(toy_folder), "cpu")
    walk.unlink()  # its text came with the config
    found = generate(
        rank, *(Task(f"g{i}", "train", i, (4 * i, 4 * i + 1, 7), group_seed=i) for i in (0, 1, 2))
    )
    asyncio.run(rank.stop())
    late = f"environment: '{walk}:Walk' did not answer within 3 s"
    for i, (summary, group) in ((int(name[1]), pair) for name, pair in found.items()):
        assert values(summary, "error") == (None, None, late) and values(summary, "turns") == (
            2,
            2,
            1,
        )
        assert values(summary, "status") == ("length", "length", "error") and values(
            summary, "reward"
        ) == (
            1.0,
            1.0,
            0.0,
        )
        assert values(summary, "metrics") == ({"seed": 4.0 * i}, {"seed": 4.0 * i + 1}, {})
        assert f"walk {i}" in rank.processor.tokenizer.decode(group.prefix)


def test_training_draws_a_wording_for_each_group_and_validation_shows_the_first(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "x?", "answer": "3"}))
    form = RowFormat(image_keys=[], prompt_variants=["a {problem}", "b {problem}", "c {problem}"])
    rank = RolloutRank.__new__(RolloutRank)
    rank.datasets = dict.fromkeys(
        ("train", "val"), ProblemDataset([str(tmp_path / "rows.jsonl")], "train", form)
    )

    def asked(split: str, group_seed: int) -> str:
        problem = rank._problem(Task("g", split, 0, (1,), group_seed=group_seed))
        return problem.messages[0]["content"][0]["text"]

    assert [asked("train", seed) for seed in (0, 1, 5, 2**64 - 1)] == [
        "a x?",
        "b x?",
        "c x?",
        "a x?",
    ]
    assert {asked("val", seed) for seed in range(5)} == {"a x?"}
