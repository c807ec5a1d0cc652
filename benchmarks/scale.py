"""Scale: what a step costs the controller, for 10³ to 10⁵ groups, 8 to 4,096 ranks and as many engines; and real dispatch.

    python benchmarks/scale.py [--groups 1000 10000 100000] [--ranks 8 512 4096] [--steps 3]
        [--late 2500 10000] [--evaluated 25000 100000] [--engines 50 200] [--workers 20 200] [--json FILE]

All but the last are simulated: engines answer at once, and ranks do nothing. What is measured is the controller's own time, in
CPU seconds of its process, which do not depend on what else runs.

- Steps: the loop (`train`), generation ahead, the supervisor of the rollout workers, the planner, the split over ranks, metrics
  and ledger are the real ones. What a rank would be sent is pickled, as Ray does it, and counted. An engine has eight ranks. The
  figure of a size is the median of its steps behind the first.
- Late groups: the loop with `runner.schedule: async`. Groups arrive one by one, those requested last before all others, so each
  step has more finished groups than it takes and still waits for old ones.
- Evaluation: the groups of an evaluation that records all of them, on as many engines as the last number of `--engines` says.
- Engines: one submission of the most groups of `--late`, answered by few and by many engines, and released. `messages` counts
  what the engines are told about groups that are released: once in all in an evaluation, here one by one.
- Dispatch: Ray actors that answer at once, as many as `--workers` says, under the real supervisor: groups a second.

`growth` is how many times longer a size takes than the one before it, beside n log n's. The exit code is 1 if one of them is
more than `MAX_EXCESS` times as large: then something grows with the square.
"""

import argparse
import asyncio
import dataclasses
import gc
import io
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray import cloudpickle
from rich.console import Console
from rich.table import Table

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config import load_config
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.loop import train
from rlinf_vl.controller.recorder import Recorder
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.tasks import make_tasks
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.extras.eval.evaluate import answer_tasks
from rlinf_vl.extras.eval.figures import evaluation
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.episode.batch_stream import BatchStream, StoredGroup
from rlinf_vl.rollout.pool.supervisor import Supervisor
from rlinf_vl.rollout.pool.worker_handle import WorkerHandle
from rlinf_vl.rollout.submission import GroupArrived, Submission, Task
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.types import GroupSummary, Prices, TrajectorySummary

SAMPLES = 8
#: Most samples that a simulated engine runs at once.
RUNNING = 256
RANKS_PER_ENGINE = 8
#: Versions that a late group may be behind.
MAX_STALENESS = 2
#: How much more than n log n a time may grow. Four times the groups cost 4.6 times as much, or 16 times with the square.
MAX_EXCESS = 2.0


def summary_of(group_id: str, number: int) -> GroupSummary:
    """A group of responses with a long tail to a prompt with an image."""
    rng = np.random.default_rng(number)
    prompt = int(rng.integers(150, 500))
    lengths = np.clip(rng.lognormal(4.6, 0.6, SAMPLES), 20, 300).astype(int).tolist()
    rewards = rng.integers(0, 2, SAMPLES).astype(float).tolist()
    trajectories = []
    for length, reward in zip(lengths, rewards, strict=True):
        trajectories.append(
            TrajectorySummary(
                tokens=prompt + length,
                response_tokens=length,
                reward=reward,
                correct=reward > 0,
                turn_rewards=(reward,),
                turn_tokens=(length,),
                turn_states=("",),
                turn_thoughts=((0, 0, 0),),
            )
        )
    return GroupSummary(
        id=group_id,
        problem_id=f"train:{number}",
        prompt_tokens=prompt,
        trajectories=tuple(trajectories),
        min_version=0,
        max_version=0,
        images=1,
        patches=2 * prompt,
        image_bytes={str(number): 50_000},
    )


#: What engines answer, made before anything is timed.
KNOWN = [summary_of("", number) for number in range(1000)]


def answer_to(task: Task, version: int = 0) -> GroupSummary:
    """Return the summary of a task's group, sampled from the weights of this version."""
    known = KNOWN[task.row % len(KNOWN)]
    return dataclasses.replace(known, id=task.group_id, min_version=version, max_version=version)


class SimulatedWorker:
    """A rollout worker that has answered before it is asked; counts what it is told about groups that nobody needs."""

    messages = 0

    async def call(self, method: str, *arguments):
        return None

    async def generate(self, tasks):
        for task in tasks:
            await asyncio.sleep(0)  # as many turns of the supervisor's loop as answers
            yield answer_to(task), None if task.summary_only else task.group_id

    def cancel(self, group_ids) -> None:
        self.messages += 1

    def release(self, group_ids) -> None:
        self.messages += 1

    def watch(self) -> None: ...

    def failure(self) -> None: ...

    def kill(self) -> None: ...


class SimulatedPool:
    """The part of `RolloutPool` that the loop uses, around a real supervisor."""

    restarts = turnover = 0

    def __init__(self, engines: int) -> None:
        self._supervisor = Supervisor(
            lambda number: SimulatedWorker(),
            engines,
            max_running=RUNNING,
            report=print,
        )
        self._supervisor.start()
        self.workers = self._supervisor.slots
        self.version = 0

    @property
    def messages(self) -> int:
        """What engines were told about groups that nobody needs, in messages."""
        return sum(slot.worker.messages for slot in self._supervisor.slots)

    def submit(self, tasks, events=None):
        return self._supervisor.submit(tasks, tasks, lambda: None, events)

    def release(self, summaries=None) -> None:
        group_ids = None if summaries is None else [summary.id for summary in summaries]
        self._supervisor.soon(self._supervisor.groups.release, group_ids)

    def acknowledge(self, group_ids) -> None:
        self._supervisor.soon(self._supervisor.groups.acknowledge, group_ids)

    def cancel(self, group_ids) -> None:
        self._supervisor.soon(self._supervisor.groups.cancel, group_ids)

    def entries(self) -> list:
        return []

    def settle(self) -> None:
        """Wait until the supervisor has done all that it was asked."""
        self._supervisor.call(0, "", "ready").result()

    def stop(self) -> None:
        self._supervisor.stop()


class Rank:
    """Pickles what a rank is sent, as Ray does, and counts the bytes."""

    def __init__(self) -> None:
        self.sent = 0
        sums = MetricSums()
        for name in range(30):
            sums.add(f"actor/{name}", 1.0, 1.0)
        self.state = sums.state()
        self.update = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._update))
        self.fetch_groups = SimpleNamespace(remote=self._fetch)

    def _update(self, *arguments):
        self.sent += len(cloudpickle.dumps(arguments))
        return self.state, None

    def _fetch(self, groups):
        self.sent += len(cloudpickle.dumps(groups))
        return []


class SimulatedGroup(ActorGroup):
    """The real split over ranks, to ranks that do nothing."""

    def __init__(self, ranks: int) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self._shares = list(range(ranks))
        self.begun: list[float] = []  # CPU seconds at which each step's training began
        self.data_size = ranks
        self.prices = Prices()

    def update(self, *arguments, **options):
        self.begun.append(time.process_time())
        return super().update(*arguments, **options)

    def wait(self, pending, beating=True):
        return list(pending)

    def entries(self, restarts):
        return []


class LatePool:
    """The part of `RolloutPool` that the loop uses; whoever waits gets the group that was requested last.

    Attributes:
        version: that of the engines' weights.
    """

    restarts = turnover = 0
    workers = (None,)

    def __init__(self) -> None:
        self.version = 0
        self._unanswered: list[tuple[Submission, Task, int]] = []

    def submit(self, tasks, events=None):
        submission = Submission(tasks, self._answer, self._close, events)
        self._unanswered += [(submission, task, self.version) for task in tasks]
        return submission

    def _answer(self) -> None:
        if self._unanswered:
            submission, task, version = self._unanswered.pop()
            submission.events.put(GroupArrived(answer_to(task, version), task.group_id))
            submission.arrived.add(task.group_id)

    def _close(self, closed: Submission) -> None:
        self._unanswered = [entry for entry in self._unanswered if entry[0] is not closed]

    def release(self, summaries=None) -> None: ...

    def acknowledge(self, group_ids) -> None: ...

    def cancel(self, group_ids) -> None: ...

    def entries(self) -> list:
        return []

    def stop(self) -> None: ...


class SimulatedSync:
    """Tells a pool which version its engines have, and sends nothing."""

    def __init__(self, pool: SimulatedPool | LatePool) -> None:
        self._pool = pool

    def begin(self, version: int) -> None: ...

    def __call__(self, version: int) -> dict[str, float]:
        self._pool.version = version
        return {}


def quiet_config(folder: Path, *overrides: str) -> Config:
    """Load a config that records, saves and validates nothing."""
    return load_config(
        "toy-grpo-cpu",
        [
            "runner.max_tokens_per_mbs=16384",
            "runner.seq_length=4096",
            "runner.val_check_interval=-1",
            "runner.save_interval=-1",
            "runner.mismatch_check_interval=-1",
            "runner.trajectories.max_gb=0",
            f"runner.output_dir={folder}",
            f"algorithm.group_size={SAMPLES}",
            *overrides,
        ],
    )


def no_writer() -> NoReturn:
    raise AssertionError("these runs record nothing")


def make_log(config: Config, home: Path) -> RunLog:
    """Make the log of a run in an empty folder."""
    return RunLog(config, home, no_writer, RunProgress(console=Console(file=io.StringIO())))


def train_steps(
    config: Config, home: Path, pool: SimulatedPool | LatePool, learner: SimulatedGroup
) -> float:
    """Run the loop; returns the median CPU seconds of a step behind the first."""
    log = make_log(config, home)
    groups, steps = config.data.rollout_batch_size, config.runner.max_steps
    rows = range(2 * groups)
    sampler = EpochSampler(rows, groups, shuffle=True, seed=0)
    bad_rows = BadRows(home, config.data.max_bad_rows, {"train": len(rows), "val": 0})
    data = DatasetPlan(sampler, [], answers=Counter(), total_steps=steps, bad_rows=bad_rows)
    gpu = SharedGpu(pool, shared=False, offload=False)
    train(
        config, pool, learner, data, home, StopRequest(), gpu=gpu, sync=SimulatedSync(pool), log=log
    )
    log.close()
    pool.stop()
    return statistics.median(b - a for a, b in zip(learner.begun, learner.begun[1:], strict=False))


def step_seconds(groups: int, ranks: int, steps: int, folder: Path) -> dict[str, float]:
    """Seconds of a step by phase, and bytes that a rank is sent."""
    keys = f"runner.max_steps={steps}", f"data.rollout_batch_size={groups}"
    home = Path(tempfile.mkdtemp(dir=folder))
    pool, learner = SimulatedPool(max(1, ranks // RANKS_PER_ENGINE)), SimulatedGroup(ranks)
    cpu = train_steps(quiet_config(folder, *keys), home, pool, learner)
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    later_rows = [row for row in rows if row["step"]][1:]
    figures = {"cpu": cpu}
    for name in ("step", "generate"):
        figures[f"{name}_wall"] = statistics.median(row[f"time/{name}"] for row in later_rows)
    figures["bytes_per_rank"] = sum(rank.sent for rank in learner.ranks) / ranks / steps
    return figures


def late_seconds(groups: int, steps: int, folder: Path) -> float:
    """CPU seconds of a step of groups that arrive newest first."""
    keys = (
        f"runner.max_steps={steps}",
        f"data.rollout_batch_size={groups}",
        "runner.schedule=async",
        f"runner.max_staleness={MAX_STALENESS}",
        "cluster.component_placement={actor: 0, rollout: 1}",
    )
    home = Path(tempfile.mkdtemp(dir=folder))
    return train_steps(quiet_config(folder, *keys), home, LatePool(), SimulatedGroup(1))


class RecordEverything(Recorder):
    """Chooses all groups, as with `runner.trajectories.groups: -1`, and has no process that writes them."""

    def choose(self, split: str, step: int, n: int) -> list[int]:
        return list(range(n))


def evaluation_seconds(groups: int, engines: int, folder: Path) -> tuple[float, int]:
    """CPU seconds from the tasks of an evaluation to its figures, and messages that release its groups."""
    config, home = quiet_config(folder), Path(tempfile.mkdtemp(dir=folder))
    log = make_log(config, home)
    log.recorder = RecordEverything(config.runner, no_writer, report=print)
    pool = SimulatedPool(engines)
    # As a run does: a collection would visit all modules' objects, the more often the more groups.
    gc.collect()
    gc.freeze()
    begun = time.process_time()
    tasks = make_tasks("val", range(groups), SAMPLES, 0, 0)
    summaries = answer_tasks(pool, log, tasks)
    assert [summary.id for summary in summaries] == [task.group_id for task in tasks]
    assert len(evaluation(summaries, SAMPLES, {})["by_turns"]) == 1
    pool.release(log.recorder.close())
    pool.settle()
    seconds = time.process_time() - begun
    pool.stop()
    log.close()
    return seconds, pool.messages


def engine_seconds(groups: int, engines: int) -> tuple[float, int]:
    """CPU seconds in which so many engines answer these groups, and messages that release them one by one."""
    pool = SimulatedPool(engines)
    tasks = [Task(f"train-0-{k}", "train", k, tuple(range(SAMPLES))) for k in range(groups)]
    begun = time.process_time()
    results = pool.submit(tasks).results()
    for summary, _ in results:
        pool.release([summary])
    pool.settle()
    seconds = time.process_time() - begun
    pool.stop()
    return seconds, pool.messages


class LightWorker(BatchStream):
    """A rollout worker without engine, data and player: its batches and its stream are the real ones."""

    async def process(self):
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def heartbeat(self) -> bool:
        return True

    async def cancel(self, group_ids):
        pass

    async def release(self, group_ids):
        pass

    async def ready(self):
        return {}

    async def generate(self, tasks):
        for task in tasks:
            yield [StoredGroup(answer_to(task), ray.put(task.row))]


def dispatch_rate(workers: int, groups: int) -> dict[str, float]:
    """Groups a second from real actors, and seconds to start those."""
    begun = time.perf_counter()
    actor = ray.remote(num_cpus=0)(LightWorker)
    supervisor = Supervisor(
        lambda number: WorkerHandle(actor.remote(), 600.0),
        workers,
        max_running=RUNNING,
        report=print,
    )
    supervisor.start()
    started, rates = time.perf_counter() - begun, []
    for number in range(3):
        tasks = [Task(f"{number}-{k}", "train", k, tuple(range(SAMPLES))) for k in range(groups)]
        begun = time.perf_counter()
        assert len(supervisor.submit(tasks, tasks, lambda: None).results()) == groups
        rates.append(groups / (time.perf_counter() - begun))
    for slot in supervisor.slots:
        ray.kill(slot.worker.actor)
    supervisor.stop()
    return {"start_seconds": started, "groups_per_second": statistics.median(rates[1:])}


class Growths:
    """Compares the seconds of growing sizes with n log n.

    Attributes:
        figures: what was measured, by name, for `--json`.
        excesses: a sentence for each size whose time grows too fast.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.excesses: list[str] = []

    def compare(
        self, name: str, sizes: Sequence[int], measure: Callable[[int], float]
    ) -> list[tuple[str, str]]:
        """Measure each size; returns the growth and n log n's of each measurement, as text.

        A size that grows too fast is measured once more, with the one before it: another process on the machine
        can double a time, and of two times the smaller one counts.

        Args:
            name: begins the names of the figures, and ends in what is counted.
        """
        if not sizes:
            return []
        columns = [("", "")]
        seconds = {sizes[0]: measure(sizes[0])}
        for smaller, size in itertools.pairwise(sizes):
            bound = size * math.log(size) / smaller / math.log(smaller)
            seconds[size] = measure(size)
            if (growth := seconds[size] / seconds[smaller]) > MAX_EXCESS * bound:
                columns += [(f"{growth:.1f}", f"{bound:.1f}"), ("", "")]
                for again in (smaller, size):
                    seconds[again] = min(seconds[again], measure(again))
                growth = seconds[size] / seconds[smaller]
            self.figures[f"growth_to_{size}_{name}"] = growth
            columns.append((f"{growth:.1f}", f"{bound:.1f}"))
            if growth > MAX_EXCESS * bound:
                self.excesses.append(
                    f"{name}: {growth:.1f} times from {smaller} to {size}, n log n {bound:.1f}"
                )
        return columns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 512, 4096])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--late", type=int, nargs="*", default=[2500, 10_000])
    parser.add_argument("--evaluated", type=int, nargs="*", default=[25_000, 100_000])
    parser.add_argument("--engines", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--workers", type=int, nargs="*", default=[20, 200])
    parser.add_argument("--dispatched", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    growths = Growths()
    with tempfile.TemporaryDirectory() as folder:
        tabulate_steps(args, growths, Path(folder))
        tabulate_growth(args, growths, Path(folder))
    if args.workers:
        tabulate_dispatch(args, growths.figures)
    if args.json:
        args.json.write_text(json.dumps(growths.figures, indent=1) + "\n")
    if growths.excesses:
        sys.exit("\n".join(growths.excesses))


def tabulate_steps(args: argparse.Namespace, growths: Growths, folder: Path) -> None:
    """Measure and print whole steps."""
    table = Table(title=f"CPU seconds of the controller for a step, groups of {SAMPLES}")
    for column in (
        "groups",
        "ranks",
        "seconds",
        "of the clock",
        "generate",
        "bytes a rank",
        "growth",
        "n log n",
    ):
        table.add_column(column)
    for ranks in args.ranks:
        rows = []

        def measure(groups: int, ranks: int = ranks, rows: list[list[str]] = rows) -> float:
            figures = step_seconds(groups, ranks, args.steps, folder)
            for name, value in figures.items():
                growths.figures[f"groups_{groups}_ranks_{ranks}_{name}"] = value
            seconds = [f"{figures[name]:.3f}" for name in ("cpu", "step_wall", "generate_wall")]
            rows.append(
                [f"{groups:,}", f"{ranks:,}", *seconds, f"{figures['bytes_per_rank']:,.0f}"]
            )
            return figures["cpu"]

        columns = growths.compare(f"ranks_{ranks}", args.groups, measure)
        for row, (growth, bound) in zip(rows, columns, strict=True):
            table.add_row(*row, growth, bound)
    Console().print(table)


def tabulate_growth(args: argparse.Namespace, growths: Growths, folder: Path) -> None:
    """Measure and print late groups, evaluations, and few engines against many."""
    table = Table(title=f"CPU seconds of the controller, groups of {SAMPLES}")
    for column in ("", "groups", "engines", "seconds", "messages", "growth", "n log n"):
        table.add_column(column)
    rows: list[list[str]] = []

    def measure_late(groups: int) -> float:
        seconds = growths.figures[f"late_{groups}_cpu"] = late_seconds(
            groups, args.steps + 1, folder
        )
        rows.append(["a step of late groups", f"{groups:,}", "", f"{seconds:.3f}", ""])
        return seconds

    def measure_evaluation(groups: int) -> float:
        engines = args.engines[-1]
        seconds, messages = evaluation_seconds(groups, engines, folder)
        growths.figures |= {
            f"evaluated_{groups}_cpu": seconds,
            f"evaluated_{groups}_messages": messages,
        }
        rows.append(
            ["an evaluation", f"{groups:,}", f"{engines:,}", f"{seconds:.3f}", f"{messages:,}"]
        )
        return seconds

    def measure_engines(engines: int) -> float:
        groups = max(args.late)
        seconds, messages = engine_seconds(groups, engines)
        growths.figures |= {
            f"engines_{engines}_cpu": seconds,
            f"engines_{engines}_messages": messages,
        }
        rows.append(
            ["a submission", f"{groups:,}", f"{engines:,}", f"{seconds:.3f}", f"{messages:,}"]
        )
        return seconds

    columns = growths.compare("late", args.late, measure_late)
    columns += growths.compare("evaluated", args.evaluated, measure_evaluation)
    if args.late:
        columns += growths.compare("engines", args.engines, measure_engines)
    for row, (growth, bound) in zip(rows, columns, strict=True):
        table.add_row(*row, growth, bound)
    Console().print(table)


def tabulate_dispatch(args: argparse.Namespace, figures: dict[str, float]) -> None:
    """Measure and print dispatch to real Ray actors."""
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=2**28,
        logging_level="error",
        num_cpus=2,
    )
    table = Table(title=f"{args.dispatched} groups from Ray actors that answer at once")
    for column in ("workers", "seconds to start", "groups / s"):
        table.add_column(column)
    for workers in args.workers:
        rates = dispatch_rate(workers, args.dispatched)
        figures |= {f"workers_{workers}_{name}": value for name, value in rates.items()}
        table.add_row(
            str(workers), f"{rates['start_seconds']:.1f}", f"{rates['groups_per_second']:,.0f}"
        )
    ray.shutdown()
    Console().print(table)


if __name__ == "__main__":
    main()
