"""A pool and a learner in memory, for tests of the loop: numbers only, in milliseconds.

What engines "sample" depends on a task's seeds and on the weights that they were sent; what the learner "learns" depends on
its weight and on the advantages. So a run that goes on from a wrong place shows other metrics than one never stopped.
"""

import copy
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import NoReturn

import yaml
from rich.console import Console

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.loop import train
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.status import StatusFile
from rlinf_vl.rollout.submission import GroupArrived, Submission, SubmissionEnded
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.types import GroupSummary, Prices, TrajectorySummary

START = 0.5  # the learner's weight, and the engines', before the first step


def number(*parts: object) -> float:
    """In [0, 1), from anything printable."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest()) / 2**48


def summary(group_id: str, problem: str, rewards: list[float], **changes) -> GroupSummary:
    """Return a group whose trajectories have these rewards, and one turn each.

    `changes`: of fields of the group, or lists with a value for each trajectory (`error`, …).
    """
    by_trajectory = {
        name: changes.pop(name)
        for name in list(changes)
        if name in TrajectorySummary.__dataclass_fields__
    }
    trajectories = []
    for i, reward in enumerate(rewards):
        fields = {
            "tokens": 6 + i,
            "response_tokens": 1 + i,
            "reward": reward,
            "correct": reward > 0.5,
            "turn_rewards": (reward,),
            "turn_tokens": (1 + i,),
            "turn_states": ("",),
            "turn_thoughts": ((0, 3, 0),),
        }
        own = {name: values[i] for name, values in by_trajectory.items()}
        trajectories.append(TrajectorySummary(**(fields | own)))
    fields = {
        "id": group_id,
        "problem_id": problem,
        "prompt_tokens": 5,
        "trajectories": tuple(trajectories),
        "min_version": 0,
        "max_version": 0,
        "images": 1,
        "patches": 4,
        "image_bytes": {problem: 10},
    }
    return GroupSummary(**(fields | changes))


class FakePool:
    """Answers in memory. `strike(calls)` is called at the begin of each submission, with their number so far."""

    def __init__(self, strike: Callable[[int], None] = lambda calls: None) -> None:
        self.restarts = 0
        self.workers = [None]
        self.weight = START  # of the engines
        self.versions: list[int] = []  # of the weights that they were sent
        self.asked: list[list[str]] = []  # group ids, by call
        self.alive: set[str] = set()  # groups that nobody has released
        self.validated: dict[
            str, int
        ] = {}  # version of the weights that each validation group is from
        self.changes: dict[str, dict] = {}  # group id → fields of its summary that differ
        self.told: list[str] = []
        self.acknowledged: list[str] = []
        self.cancelled: list[str] = []
        self.strike = strike

    def acknowledge(self, group_ids):
        self.acknowledged += group_ids

    def cancel(self, group_ids):
        self.cancelled += group_ids

    def release_tags(self):
        return ()

    def release_memory(self, tags):
        pass

    def restore_memory(self, tags):
        pass

    def submit(self, tasks, events=None):
        self.strike(len(self.asked))
        self.asked.append([task.group_id for task in tasks])
        self.alive |= {task.group_id for task in tasks if not task.summary_only}
        self.validated |= {
            task.group_id: self.versions[-1]
            for task in tasks
            if task.split == "val" and self.versions
        }
        results = []
        for task in tasks:
            rewards = [round(number(seed, self.weight), 2) for seed in task.seeds]
            version = self.versions[-1] if self.versions else 0
            changes = {"min_version": version, "max_version": version} | self.changes.get(
                task.group_id, {}
            )
            rewards = list(changes.pop("rewards", rewards))
            group = None if task.summary_only else task.group_id
            done = summary(task.group_id, f"{task.split}:{task.row}", rewards, **changes)
            results.append(GroupArrived(done, group))
        submission = Submission(tasks, lambda: None, lambda submission: None, events)
        submission.arrived = {task.group_id for task in tasks}
        for event in (*results, SubmissionEnded()):
            submission.events.put(event)
        return submission

    def release(self, summaries=None):
        gone = self.alive if summaries is None else {s.id for s in summaries}
        assert gone <= self.alive, f"released twice: {gone - self.alive}"
        self.alive = self.alive - gone

    @property
    def turnover(self):
        return self.restarts

    def entries(self):
        return [{"name": "rollout 0", "state": "alive", "restarts": self.restarts}]

    # what `run` needs beside the loop

    def start(self):
        return {"train": 40, "val": 8}

    def filter_rows(self, split, rows, progress):
        progress(len(rows))
        return FilterResult(kept={row: str(row % 3) for row in rows})

    def open_membership(self):
        pass

    def forget_weights(self):
        self.told.append("forget weights")

    def replace_all(self, reason):
        self.told.append("replace all")

    def close(self):
        self.told.append("close")

    def stop(self):
        self.told.append("stop")


class FakeLearner:
    """Learns one number. `strike(step)` is called in each update: what it returns are metrics to change, what it raises ends it."""

    def placed(self, interrupted):
        return True

    def __init__(self, strike: Callable[[int], dict | None] = lambda step: None) -> None:
        self.data_size = 2
        self.prices = Prices()
        self.weight = START
        self.lost: list[list[int]] = []  # what the next calls of `fetch_groups` report
        self.checked: list[int] = []  # steps that the mismatch guard has asked about
        self.blank_difference = 5.0  # of each scored trajectory; with its images it is `difference`
        self.difference = 0.0
        self.disk_full = False
        self.strike = strike
        self.fetched: list[str] = []
        self.trained: list[list[str]] = []  # groups, by update
        self.told: list[str] = []

    def fetch_groups(self, minibatches, groups):
        self.fetched = list(groups)
        named = {
            item.group
            for mini in minibatches
            for rank in mini
            for items in rank.micro_batches
            for item in items
        }
        assert named <= set(range(len(groups)))
        return self.lost.pop(0) if self.lost else []

    def score(self, minibatch):
        items = [item for rank in minibatch for items in rank.micro_batches for item in items]
        self.checked.append(int(self.fetched[0].split("-")[1]))
        return [
            (i.group, i.loss_tokens, self.difference * i.loss_tokens, self.blank_difference)
            for i in items
        ]

    def replay_weights(self):
        return {"weight": self.weight}

    def update(self, step, minibatches, advantages, recorded, kl_scale, then):
        then()
        self.trained.append(list(self.fetched))
        trained = sorted(
            (i.group, i.index)
            for mini in minibatches
            for rank in mini
            for items in rank.micro_batches
            for i in items
        )
        metrics = {
            "actor/loss": number(self.weight, advantages, trained),
            "actor/skipped_steps": 0.0,
        }
        metrics |= self.strike(step) or {}
        if not metrics["actor/skipped_steps"]:
            self.weight = metrics["actor/loss"]
        return metrics, []

    def stage(self):
        self.staged = self.weight

    def write(self, folder):
        if self.disk_full:
            raise OSError(28, "No space left on device")
        content = json.dumps(self.staged).encode()
        Path(folder, "weight.json").write_bytes(content)
        return {"weight.json": hashlib.sha256(content).hexdigest()}

    def load(self, folder, step):
        self.weight = json.loads(Path(folder, "weight.json").read_text())

    def entries(self, restarts):
        return [{"name": "actor 0", "state": "alive", "restarts": restarts}]

    def release_memory(self, parts):
        pass

    # what `run` needs beside the loop

    def start(self, total_steps):
        self.told.append("start")

    def kill(self):
        self.told.append("kill")

    def stop(self):
        self.told.append("stop")


def no_writer() -> NoReturn:
    raise AssertionError("these runs record nothing")


class FakeRun:
    """A run of `STEPS` steps in a folder, with everything that `train` wants."""

    def __init__(
        self, run_dir: Path, *overrides: str, pool=None, learner=None, start: Path | None = None
    ) -> None:
        self.run_dir = run_dir
        self.config = fake_config(run_dir, *overrides)
        self.pool = pool or FakePool()
        self.learner = learner or FakeLearner()
        self.stop = StopRequest()
        self.start = start
        runner, data = self.config.runner, self.config.data
        sampler = EpochSampler(range(40), data.rollout_batch_size, shuffle=True, seed=data.seed)
        bad_rows = BadRows(run_dir, data.max_bad_rows, {"train": 40, "val": 8})
        val_rows = [] if runner.val_check_interval < 0 else list(range(8))
        total = min(runner.max_steps, sampler.batches_per_epoch * runner.max_epochs)
        self.data = DatasetPlan(
            sampler, val_rows, answers=Counter(), total_steps=total, bad_rows=bad_rows
        )
        self.progress = RunProgress(StatusFile(run_dir), console=Console(file=io.StringIO()))
        self.log = RunLog(self.config, run_dir, no_writer, self.progress)
        self.begun = 0  # version of a sync that is queued

    def begin(self, version: int) -> None:
        """A sync that is queued; the call that ends it follows in the same step."""
        self.begun = version

    def __call__(self, version: int) -> dict[str, float]:
        assert self.begun in (0, version)
        self.begun = 0
        self.pool.weight = self.learner.weight
        self.pool.versions.append(version)
        return {"sync/bytes": 8}

    def train(self) -> dict[str, float]:
        self.begun = 0
        gpu = SharedGpu(self.pool, shared=False, offload=False)
        return train(
            self.config,
            self.pool,
            self.learner,
            self.data,
            self.run_dir,
            self.stop,
            gpu=gpu,
            sync=self,
            log=self.log,
            start=self.start,
        )

    def rows(self, name: str = "metrics") -> list[dict]:
        path = self.run_dir / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metrics(self) -> dict[int, dict]:
        """By step, what must be equal in runs of the same computation."""
        varies = ("time/", "rollout/tokens_per_second", "actor/tokens_per_second", "actor/restarts")
        return {
            row["step"]: {name: value for name, value in row.items() if not name.startswith(varies)}
            for row in self.rows()
        }

    def events(self, *kinds: str) -> list[tuple[str, int]]:
        return [
            (row["kind"], row["step"])
            for row in self.rows("events")
            if not kinds or row["kind"] in kinds
        ]

    def checkpoints(self) -> list[int]:
        return sorted(
            int(path.name.split("_")[-1])
            for path in (self.run_dir / "checkpoints").glob("global_step_*")
        )


def fake_config(run_dir: Path, *overrides: str) -> Config:
    config = copy.deepcopy(_base_config())
    for override in (f"runner.output_dir={run_dir}", *overrides):
        key, _, value = override.partition("=")
        *sections, name = key.split(".")
        section = reduce(getattr, sections, config)
        assert hasattr(section, name), key
        setattr(section, name, yaml.safe_load(value))
    return config


@cache
def _base_config() -> Config:
    """Read once: Hydra takes longer than a run."""
    overrides = [
        "runner.max_steps=6",
        "runner.val_check_interval=2",
        "runner.save_interval=3",
        "runner.mismatch_check_interval=4",
        "runner.trajectories.max_gb=0",
        "runner.logger.logger_backends=[]",
        "runner.async_save=false",
        "data.rollout_batch_size=4",
        "algorithm.group_size=4",
    ]
    return parse_config("toy-grpo-cpu", overrides)
