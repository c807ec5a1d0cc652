"""Scale: what a step costs the controller, for 10³ to 10⁵ groups, 8 to 4,096 ranks and as many engines; and real dispatch.

    python benchmarks/scale.py [--groups 1000 10000 100000] [--ranks 8 512 4096] [--steps 3] [--workers 20 200] [--json FILE]

- Simulated: the loop (`train`), generation ahead, the supervisor of the rollout workers, the planner, the split over ranks, metrics
  and ledger are the real ones. Engines answer at once, and ranks do nothing: what a rank would be sent is pickled, as Ray does
  it, and counted. An engine has eight ranks. So a step's seconds are the controller's own; they are CPU seconds of its process,
  which do not depend on what else runs. The figure of a size is the median of its steps behind the first; `growth` is how many
  times longer a step takes than with the size before, beside n log n's.
- Dispatch: Ray actors that answer at once, as many as `--workers` says, under the real supervisor: groups a second.
"""

import argparse
import asyncio
import dataclasses
import io
import json
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray import cloudpickle
from rich.console import Console
from rich.table import Table

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config import load_config
from rlinf_vl.controller.loop import train
from rlinf_vl.controller.run_data import RunData
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.pool import _RayWorker
from rlinf_vl.rollout.submission import Task
from rlinf_vl.rollout.supervisor import Supervisor
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.types import GroupSummary, Prices

SAMPLES = 8
#: Most samples that a simulated engine runs at once.
RUNNING = 256
RANKS_PER_ENGINE = 8


def summary_of(group_id: str, number: int) -> GroupSummary:
    """A group of responses with a long tail to a prompt with an image."""
    rng = np.random.default_rng(number)
    prompt = int(rng.integers(150, 500))
    lengths = tuple(int(n) for n in np.clip(rng.lognormal(4.6, 0.6, SAMPLES), 20, 300))
    rewards = tuple(float(r) for r in rng.integers(0, 2, SAMPLES))
    return GroupSummary(
        id=group_id,
        problem_id=f"train:{number}",
        prompt_tokens=prompt,
        tokens=tuple(prompt + n for n in lengths),
        response_tokens=lengths,
        rewards=rewards,
        correct=tuple(r > 0 for r in rewards),
        statuses=("stop",) * SAMPLES,
        errors=(None,) * SAMPLES,
        min_version=0,
        max_version=0,
        images=1,
        patches=2 * prompt,
        image_bytes={str(number): 50_000},
        turns=(1,) * SAMPLES,
        metrics=({},) * SAMPLES,
        parts=({},) * SAMPLES,
        turn_rewards=tuple((r,) for r in rewards),
        turn_tokens=tuple((n,) for n in lengths),
        turn_states=(("",),) * SAMPLES,
        turn_thoughts=(((0, 0, 0),),) * SAMPLES,
        cuts=(0,) * SAMPLES,
    )


#: What engines answer, made before anything is timed.
KNOWN = [summary_of("", number) for number in range(1000)]


def answer_to(task: Task) -> GroupSummary:
    return dataclasses.replace(KNOWN[task.row % len(KNOWN)], id=task.group_id)


class SimulatedWorker:
    """A rollout worker that has answered before it is asked."""

    async def call(self, method: str, *arguments):
        return None

    async def generate(self, tasks):
        for task in tasks:
            await asyncio.sleep(0)  # as many turns of the supervisor's loop as answers
            yield answer_to(task), None

    def cancel(self, group_ids) -> None: ...

    def release(self, group_ids) -> None: ...

    def watch(self) -> None: ...

    def failure(self) -> None: ...

    def kill(self) -> None: ...


class SimulatedPool:
    """The part of `RolloutPool` that the loop uses, around a real supervisor."""

    restarts = turnover = 0

    def __init__(self, engines: int) -> None:
        self._supervisor = Supervisor(
            lambda number: SimulatedWorker(), engines, max_running=RUNNING, report=print, max_row_faults=3
        )
        self._supervisor.start()
        self.workers = self._supervisor.slots

    def submit(self, tasks, events=None):
        return self._supervisor.submit(tasks, tasks, lambda: None, events)

    def release(self, summaries=None) -> None:
        self._supervisor.release(None if summaries is None else [summary.id for summary in summaries])

    def acknowledge(self, group_ids) -> None:
        self._supervisor.acknowledge(group_ids)

    def cancel(self, group_ids) -> None:
        self._supervisor.cancel(group_ids)

    def entries(self) -> list:
        return []

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


class NoSync:
    def begin(self, version: int) -> None: ...

    def __call__(self, version: int) -> dict[str, float]:
        return {}


def step_seconds(groups: int, ranks: int, steps: int, folder: Path) -> dict[str, float]:
    """Seconds of a step by phase, and bytes that a rank is sent."""
    overrides = [
        f"runner.max_steps={steps}",
        "runner.max_tokens_per_mbs=16384",
        "runner.seq_length=4096",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "runner.mismatch_check_interval=-1",
        "runner.trajectories.interval=-1",
        f"runner.output_dir={folder}",
        f"data.rollout_batch_size={groups}",
        f"algorithm.group_size={SAMPLES}",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    home = folder / f"{groups}-{ranks}"
    home.mkdir()
    sampler = EpochSampler(range(2 * groups), groups, shuffle=True, seed=0)
    bad_rows = BadRows(home, config.data.max_bad_rows, {"train": 2 * groups, "val": 0})
    data = RunData(sampler, [], answers=Counter(), total_steps=steps, bad_rows=bad_rows)
    pool, learner = SimulatedPool(max(1, ranks // RANKS_PER_ENGINE)), SimulatedGroup(ranks)
    log = RunLog(config, home, "", RunProgress(console=Console(file=io.StringIO())))
    gpu = SharedGpu(pool, shared=False, offload=False)
    train(config, pool, learner, data, home, StopRequest(), gpu=gpu, sync=NoSync(), log=log)
    log.close()
    pool.stop()
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    behind = [row for row in rows if row["step"]][1:]
    wall = {f"{name}_wall": statistics.median(row[f"time/{name}"] for row in behind) for name in ("step", "generate")}
    cpu = statistics.median(b - a for a, b in zip(learner.begun, learner.begun[1:], strict=False))
    return {"cpu": cpu} | wall | {"bytes_per_rank": sum(rank.sent for rank in learner.ranks) / ranks / steps}


class LightWorker:
    """A rollout worker without engine, data and player."""

    def process(self):
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def heartbeat(self) -> bool:
        return True

    async def ready(self):
        return {}

    async def generate(self, tasks):
        for task in tasks:
            yield [(answer_to(task), ray.put(task.row))]


def dispatch_rate(workers: int, groups: int) -> dict[str, float]:
    """Groups a second from real actors, and seconds to start those."""
    begun = time.perf_counter()
    actor = ray.remote(num_cpus=0)(LightWorker)
    supervisor = Supervisor(
        lambda number: _RayWorker(actor.remote(), 600.0), workers, max_running=RUNNING, report=print, max_row_faults=3
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 512, 4096])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[20, 200])
    parser.add_argument("--dispatched", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    table = Table(title=f"CPU seconds of the controller for a step, groups of {SAMPLES}")
    for column in ("groups", "ranks", "seconds", "of the clock", "generate", "bytes a rank", "growth", "n log n"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            last: tuple[int, float] | None = None
            for groups in args.groups:
                found = step_seconds(groups, ranks, args.steps, Path(folder))
                figures |= {f"groups_{groups}_ranks_{ranks}_{name}": value for name, value in found.items()}
                growth, bound = "", ""
                if last is not None:
                    times, allowed = found["cpu"] / last[1], groups * math.log(groups) / last[0] / math.log(last[0])
                    figures[f"growth_to_{groups}_ranks_{ranks}"] = times
                    growth, bound = f"{times:.1f}", f"{allowed:.1f}"
                last = groups, found["cpu"]
                seconds = (f"{found[name]:.3f}" for name in ("cpu", "step_wall", "generate_wall"))
                table.add_row(f"{groups:,}", f"{ranks:,}", *seconds, f"{found['bytes_per_rank']:,.0f}", growth, bound)
    Console().print(table)
    if args.workers:
        ray.init(address="local", include_dashboard=False, object_store_memory=2**28, logging_level="error", num_cpus=2)
        table = Table(title=f"{args.dispatched} groups from Ray actors that answer at once")
        for column in ("workers", "seconds to start", "groups / s"):
            table.add_column(column)
        for workers in args.workers:
            found = dispatch_rate(workers, args.dispatched)
            figures |= {f"workers_{workers}_{name}": value for name, value in found.items()}
            table.add_row(str(workers), f"{found['start_seconds']:.1f}", f"{found['groups_per_second']:,.0f}")
        ray.shutdown()
        Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
