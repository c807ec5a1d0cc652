"""A whole run that plays environments of three kinds, by its rows: a file outside the repository, FrozenLake and MiniGrid. Then it
goes on from its own folder where the file is gone."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from whole_run import LOCAL

pytestmark = pytest.mark.e2e

GUESS = '''
import asyncio, random
from PIL import Image
from rlinf_vl.envs import StepResult

class Guess:
    """Shows a shade of grey, three times; pays for answers that have the digit 1 in them."""

    def __init__(self, turns, *, group_seed):
        self.turns, self.shade = turns, random.Random(group_seed).randrange(256)

    def picture(self):
        return {"type": "image", "image": Image.new("RGB", (32, 32), (self.shade,) * 3)}

    async def start(self, problem):
        await asyncio.sleep(0)
        return [{"role": "user", "content": [self.picture(), {"type": "text", "text": problem.columns["hint"]}]}]

    def step(self, response):
        self.turns -= 1
        paid = float("1" in response)
        said = [{"role": "user", "content": [self.picture(), {"type": "text", "text": "And now?"}]}]
        return StepResult(said, paid, self.turns == 0, {"correct": paid > 0, "metrics": {"ones": paid}})

    async def close(self):
        await asyncio.sleep(0)
'''
NUMBERS = {str(n): n % 3 for n in range(100)}  # what the toy says are numbers: each is a move
LAKE = {"id": "FrozenLake-v1", "size": 64, "template": "<image>How far?\n---\n<image>And now?"}
GRID = {
    "id": "minigrid:MiniGrid-Empty-5x5-v0",
    "size": 80,
    "template": "<image>$mission?\n---\n<image>And now?",
}


def train(config: str, *overrides: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "rlinf_vl", "train", config, LOCAL, *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rows_bring_their_environments_and_a_run_goes_on_without_the_file(tmp_path):
    (tmp_path / "guess.py").write_text(GUESS)
    walk = {"env_class": "gymnasium", "hint": ""}
    kinds = [
        {"env_class": None, "env_kwargs": "null", "hint": "How dark?"},
        walk
        | {
            "env_kwargs": json.dumps(
                LAKE | {"actions": NUMBERS, "max_episode_steps": 3, "invalid_reward": -0.1}
            )
        },
        walk | {"env_kwargs": json.dumps(GRID | {"actions": NUMBERS, "max_episode_steps": 4})},
        {
            "env_class": "guess.py:Gues",
            "env_kwargs": "null",
            "hint": "",
        },  # of which there is one: a bad row
    ]
    rows = [{"problem": "Go.", "answer": str(i), **kinds[i % 3]} for i in range(12)] + [
        {"problem": "Go.", "answer": "none", **kinds[3]}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"runner.output_dir={tmp_path}/runs",
        "runner.experiment_name=walks",
        "runner.max_steps=1",
        "runner.save_interval=1",
        "runner.val_check_interval=-1",
        "runner.trajectories.groups=-1",
        "data.train_data_paths=[rows.jsonl]",
        "data.val_data_paths=[]",
        "data.image_keys=[]",
        "data.rollout_batch_size=12",
        "data.max_bad_rows=0.1",
        "algorithm.group_size=4",
        "algorithm.sampling_params.max_new_tokens=20",
        "rollout.env_class=guess.py:Guess",
        "rollout.env_kwargs.turns=2",
    ]
    train("toy-grpo-cpu", *overrides, cwd=tmp_path)
    folder = tmp_path / "runs/walks"
    (bad,) = [json.loads(line) for line in (folder / "bad_rows.jsonl").read_text().splitlines()]
    assert (
        bad["kind"] == "environment unusable"
        and "no class 'Gues'" in bad["reason"]
        and "'Guess'" in bad["reason"]
    )

    (tmp_path / "guess.py").unlink()
    train(
        str(folder / "config.yaml"), "runner.max_steps=2", "runner.resume_dir=auto", cwd=Path("/")
    )
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout/turns_max"] == 4 and 2 <= step["rollout/turns_mean"] <= 4
        answers = step["env/steps"] + step["env/invalid_answers"]
        assert 2 < answers <= 3.5, "3 on the lake, or fewer where the ice breaks; 4 in the grid"
        assert step["env/steps"] > 0, "moves are made"
        assert step["actor/rollout_train_abs_diff_max"] <= 2e-4
        assert 0 <= step["env/ones"] <= 1
    for step in (1, 2):
        table = pq.read_table(folder / f"trajectories/step_{step}.parquet").to_pylist()
        assert len(table) == 48 and not [row["error"] for row in table if row["error"]]
        starts = {row["problem_id"]: set() for row in table}
        for row in table:
            starts[row["problem_id"]].add(json.dumps(row["images"][:1]))
        assert all(len(first) == 1 for first in starts.values()), "a group sees one start"
