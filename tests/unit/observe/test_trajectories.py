"""The trajectory store: what goes in comes out, each image once, and nothing after the step that a run goes back to."""

import hashlib
import json
import pickle
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
from tokenizers import Tokenizer, decoders, models
from unit.observe.branches import branching_group, make_branches

from rlinf_vl.observe.trajectories import SCHEMA, TrajectoryStore, branches
from rlinf_vl.types import Group, ImageRef, Problem, TokenSequence, Trajectory, Turn

IMAGE = "<|image_pad|>"


@pytest.fixture
def model(tmp_path):
    """A tokenizer of one word an id, the image token being tiny's."""
    words = [f"w{i} " for i in range(tiny.VOCAB)]
    words[tiny.IMAGE_ID] = IMAGE
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def rows(run, step):
    table = pq.read_table(run / f"trajectories/step_{step}.parquet")
    assert table.schema.equals(SCHEMA)
    return table.to_pylist()


def test_rows_hold_what_was_sampled(model, run):
    rng = np.random.default_rng(0)
    labels = Problem(
        "p", (), "1", columns={"level": 2, "kind": "area", "long": "x" * 65, "list": [1]}
    ).labels
    group = replace(tiny.group(rng, [(1, 2), (2, 1)], [3, 5], "train-7-0"), labels=labels)
    group = pickle.loads(pickle.dumps(group))
    store = TrajectoryStore(run, model, IMAGE, 10**9)
    by_id = TrajectoryStore(run, model, store._tokenizer.token_to_id(IMAGE), 10**9)
    assert (by_id._image_pattern, by_id._image_id) == (store._image_pattern, store._image_id)
    assert TrajectoryStore(run, model, 10**6, 10**9)._image_pattern.sub("!", "text") == "text", (
        "no token of this tokenizer"
    )
    store.add(7, "train", group, ((0.5,), (-0.5,)), {1: np.arange(5, dtype=np.float32)})
    store.write(7)
    first, second = rows(run, 7)
    for row, trajectory, place in (
        (first, group.trajectories[0], 0),
        (second, group.trajectories[1], 1),
    ):
        assert (row["step"], row["split"], row["group_id"], row["sample"]) == (
            7,
            "train",
            "train-7-0",
            place,
        )
        (sequence,) = trajectory.sequences
        response = sequence.ids[group.prefix_length :].tolist()
        assert row["response_ids"] == response
        assert row["tokens"] == [f"w{i} " for i in response] and row["response"] == "".join(
            row["tokens"]
        )
        assert row["rollout_logprobs"] == sequence.logprobs[group.prefix_length :].tolist()
        assert row["reward"] == trajectory.reward and row["advantage"] == 0.5 - place
        assert json.loads(row["labels"]) == {"level": 2, "kind": "area"}
        for path, (image, _) in zip(row["images"], group.images, strict=True):
            assert path == f"images/{image.hash}.png"
            assert hashlib.sha256((run / path).read_bytes()).hexdigest() == image.hash
        assert row["prompt"].count("<image>") == 2 and IMAGE not in row["prompt"]
    assert first["train_logprobs"] is None and second["train_logprobs"] == [0, 1, 2, 3, 4]


def test_what_an_environment_said_has_no_logprob_of_the_trainer(model, run):
    ids, mask = np.array([4, 5, 6, 7, 8], np.int32), np.array([False, True, False, False, True])
    parts = {"format": 0.1, "accuracy": 0.9}
    sequence = TokenSequence(ids, mask, None, np.array([-1, 2, -1, -1, 3], np.int32))
    turns = (Turn(0, 1, 2, "stop", 0.0), Turn(0, 4, 5, "stop", 1.0))
    t = Trajectory((sequence,), turns, 1.0, parts, "stop", correct=True)
    failed = Trajectory((), (), 0.0, {}, "error", error="grading timed out: …")
    store = TrajectoryStore(run, model, IMAGE, 10**9)
    store.add(
        1, "train", Group("g", "p", 1, (t, failed)), ((1.5, -0.5), ()), {0: np.array([-0.5, -1.5])}
    )
    store.write(1)
    row, bad = rows(run, 1)
    train = row["train_logprobs"]
    assert (train[0], train[3]) == (-0.5, -1.5) and np.isnan(train[1:3]).all()
    assert row["rollout_logprobs"] is None and row["weight_versions"] == [2, -1, -1, 3]
    assert row["advantage"] == 0.5 and [
        t["advantage"] for t in json.loads(row["turns"])["turns"]
    ] == [1.5, -0.5]
    assert json.loads(row["reward_parts"]) == parts and row["correct"] is True
    assert (bad["correct"], bad["error"], bad["tokens"]) == (None, "grading timed out: …", [])


def test_an_image_is_written_once_and_counted_to_the_limit(model, run):
    group = tiny.group(np.random.default_rng(1), [(4, 4)], [2])
    size = len(group.images[0][0].data)
    store = TrajectoryStore(run, model, IMAGE, max_bytes=size + 100_000)
    for step in (1, 2):
        store.add(step, "val", group)
        store.write(step)
    assert len(list((run / "images").iterdir())) == 1 and not store.full
    again = TrajectoryStore(run, model, IMAGE, max_bytes=size + 1000)
    assert again.full, "what is there counts"


def test_going_back_drops_what_came_after(model, run):
    store = TrajectoryStore(run, model, IMAGE, 10**9)
    for step in (2, 9, 10, 11):
        store.add(step, "val", tiny.group(np.random.default_rng(step), [], [2]))
        store.write(step)
    store.add(12, "val", tiny.group(np.random.default_rng(12), [], [2]))
    store.drop_after(9)
    assert store.write(12) == []
    assert sorted(path.name for path in (run / "trajectories").iterdir()) == [
        "step_2.parquet",
        "step_9.parquet",
    ]


def test_where_sequences_and_turns_are(model, run):
    """Two sequences behind a prompt of one token, and an image that only the second one has; the first has two turns."""
    seen = ImageRef.of(b"seen later")
    first = TokenSequence(
        np.array([4, 5, 6, 7], np.int32),
        np.array([0, 1, 0, 1], bool),
        None,
        np.array([-1, 2, -1, 2], np.int32),
    )
    second = TokenSequence(
        np.array([4, 9, 8], np.int32),
        np.array([0, 0, 1], bool),
        None,
        np.array([-1, -1, 2], np.int32),
        ((seen, (1, 2, 2)),),
    )
    facts = json.dumps({"state": "a", "tool_calls": [{"name": "add"}]})
    turns = (
        Turn(0, 1, 2, "stop", 0.25, facts),
        Turn(0, 3, 4, "length", 0.5),
        Turn(1, 2, 3, "stop", 0.0),
    )
    store = TrajectoryStore(run, model, IMAGE, 10**9)
    t = Trajectory((first, second), turns, 0.75, {}, "stop", metrics={"goal": 1.0})
    store.add(1, "train", Group("g", "p", 1, (t,)), ((1.0, -1.0, 0.75),))
    store.write(1)
    (row,) = rows(run, 1)
    assert row["response_ids"] == [5, 6, 7, 9, 8] and row["images"] == [f"images/{seen.hash}.bin"]
    found = json.loads(row["turns"])
    assert found["sequences"] == [0, 3]
    assert [(t["start"], t["end"], t["finish_reason"], t["reward"]) for t in found["turns"]] == [
        (0, 1, "stop", 0.25), (2, 3, "length", 0.5), (4, 5, "stop", 0.0),
    ]  # fmt: skip
    assert [t["advantage"] for t in found["turns"]] == [1.0, -1.0, 0.75] and row[
        "advantage"
    ] == 0.25
    assert found["turns"][0]["state"] == "a" and found["turns"][0]["tool_calls"] == [
        {"name": "add"}
    ]
    assert "state" not in found["turns"][1] and json.loads(row["metrics"]) == {"goal": 1.0}
    by_token = (np.array([3.0], np.float32), np.array([-1.0], np.float32), 0.75)
    store.add(2, "train", Group("g", "p", 1, (t,)), (by_token,))
    store.write(2)
    (tokens,) = pq.read_table(run / "trajectories/step_2.parquet").to_pylist()
    assert tokens["advantages"] == [3, 0, -1, 0, 0.75] and "advantages" not in row
    assert [t["advantage"] for t in json.loads(tokens["turns"])["turns"]] == [3, -1, 0.75]
    assert json.loads(row["messages"]) == [
        [
            {"role": "", "content": ["w4 "], "turn": 0},
            {"role": "", "content": ["w6 "], "turn": 1},
        ],
        [{"role": "", "content": ["w4 w9 "], "turn": 2}],
    ]


def test_branches_of_an_agent_are_recorded(toy_folder, run):
    make_branches(run, toy_folder)
    ((row,),) = (rows_of(run, 1),)
    layout = json.loads(row["turns"])
    assert [turn["reward"] for turn in layout["turns"]] == [0.0] * 5 + [1.0]
    branches = layout["branches"]
    # Turns 1 to 3; turn 4 goes on from turn 2; turns 5 and 6 continue nothing.
    assert [(branch["parent"], branch["turn"]) for branch in branches] == [
        (None, None),
        (0, 1),
        (None, None),
        (None, None),
    ]
    assert branches[0]["shared"] == 0 < branches[2]["shared"] < branches[3]["shared"]
    # The retry shares the question with its image, and the branch the two answers before it.
    (trajectory,) = branching_group(toy_folder).trajectories
    first, second = trajectory.turns[:2]
    assert branches[3]["shared"] >= first.start and branches[1]["shared"] >= second.end
    assert len(layout["sequences"]) == len(json.loads(row["messages"])) == 4


def rows_of(run, step):
    return pq.read_table(run / f"trajectories/step_{step}.parquet").to_pylist()


def test_one_sequence_has_no_branches():
    rng = np.random.default_rng(0)
    (trajectory,) = tiny.group(rng, [(1, 2)], [3], "g").trajectories
    assert branches(trajectory, (tiny.IMAGE_ID,)) == {}
