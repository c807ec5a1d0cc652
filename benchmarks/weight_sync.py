"""Weight sync: seconds and GB/s of each strategy (`rollout.weight_sync`), against a plain copy of the same bytes in memory.

    python benchmarks/weight_sync.py [--megabytes 512] [--workers 2] [--repeats 5] [--bucket-megabytes 256] [--json FILE]

One sender and `--workers` receivers, each a Ray actor, with weights of the size of a small model's layers; no model and no
engine, so what is timed is the strategy itself: from the call to every receiver having copied the weights into its own memory.
GB/s counts the weights once, however many receive them. The first sync, which compares fingerprints, is timed apart. Between two
syncs a fiftieth of the values changes, which is what `delta` sends.

The plain copy is what the receivers do with the same bytes and nothing else: all of them at once, one thread each, from
memory of their own into memory that has been written before. `fraction_of_copy` is how fast one receiver gets the weights,
as a share of that copy (its seconds / the sync's seconds); `fraction_of_copy_per_worker` counts the bytes of each receiver
(times their number). A sync copies once more than the receivers do, into the memory that they share.
"""

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.weights import STRATEGIES, process_group
from rlinf_vl.weights.buckets import fingerprint
from rlinf_vl.weights.patch import Patch
from rlinf_vl.weights.place import places_of
from rlinf_vl.weights.process_group import WeightGroup
from rlinf_vl.weights.shard import local_part
from rlinf_vl.weights.strategy import Strategy, strategy_named

#: Elements of one weight, 16 MiB in float32.
ELEMENTS = 2**22


def make_weights(megabytes: int) -> list[tuple[str, torch.Tensor]]:
    count = max(1, megabytes * 2**20 // (4 * ELEMENTS))
    return [(f"layer.{i}", torch.randn(ELEMENTS).view(2048, 2048)) for i in range(count)]


@ray.remote(num_cpus=0)
class Trainer:
    """The sending side, a group of one rank."""

    def __init__(self, megabytes: int, bucket_bytes: int) -> None:
        torch.set_num_threads(1)
        self.weights, self.bucket_bytes = make_weights(megabytes), bucket_bytes
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def use(self, strategy: Strategy) -> None:
        def gather(device: str):
            return ((name, value.to(device)) for name, value in self.weights)

        def parts():
            return (local_part(name, value) for name, value in self.weights)

        self.sender = strategy.sender(gather, parts, 0, 1, "cpu", self.bucket_bytes)

    def move(self) -> None:
        """Change about every 50th value, as a step of reinforcement learning changes bfloat16 weights."""
        for _, value in self.weights:
            value.view(-1)[torch.randint(50, ()) :: 50] += 1e-3

    def listen(self) -> tuple[str, int]:
        return self.sender.listen()

    def join(self, group: WeightGroup) -> None:
        self.sender.join(group)

    def offer(self, check: bool):
        return self.sender.offer(1, check)

    def deliver(self) -> None:
        self.sender.deliver()

    def release(self) -> None:
        self.sender.release()


class Copying:
    """An engine's receiving half: it copies what arrives over its own weights."""

    reads_labels = False

    def __init__(self, megabytes: int) -> None:
        self.weights = dict(make_weights(megabytes))

    def load_weights(self, buckets, version: int) -> None:
        for bucket in buckets:
            for name, value in bucket.items():
                if isinstance(value, Patch):
                    value.apply(self.weights[name])
                else:
                    self.weights[name].copy_(value)
        self.version = version

    def join_weight_group(self, group: WeightGroup) -> None:
        self.group = process_group.join(group)

    def load_broadcast(self, labels, version: int) -> None:
        self.load_weights(process_group.receive(self.group, labels, torch.device("cpu")), version)

    def fingerprint(self, names) -> int:
        return fingerprint(self.weights[name] for name in names)


@ray.remote(num_cpus=0)
class Worker(RolloutRank):
    """The receiving side of a rollout worker and nothing else of it."""

    def __init__(self, megabytes: int) -> None:
        torch.set_num_threads(1)
        self.device, self.engine = "cpu", Copying(megabytes)
        self.source = make_weights(megabytes)

    def places(self) -> tuple[str, ...]:
        return places_of("cpu", 1)

    def copy_seconds(self, times: int) -> list[float]:
        """Of a plain copy of all weights, each time."""
        out = []
        for _ in range(times):
            start = time.perf_counter()
            self.engine.load_weights([dict(self.source)], 1)
            out.append(time.perf_counter() - start)
        return out


def sync(trainer, workers, strategy: Strategy, check: bool) -> float:
    start = time.perf_counter()
    offered = trainer.offer.remote(check)
    pending = [worker.take_weights.remote(strategy, [offered], 1) for worker in workers]
    ray.get([*pending, trainer.deliver.remote()])
    ray.get(trainer.release.remote())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-megabytes", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    size = args.megabytes * 2**20
    # the weights of two syncs may be there at once
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=max(3 * size, 2**28),
        logging_level="warning",
    )
    trainer = Trainer.remote(args.megabytes, args.bucket_megabytes * 2**20)
    workers = [Worker.remote(args.megabytes) for _ in range(args.workers)]
    times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    first, copies = {}, []
    for name in STRATEGIES:
        strategy = strategy_named(name)
        # All have started.
        ray.get([trainer.use.remote(strategy), *(worker.process.remote() for worker in workers)])
        if strategy.joins_group:
            group = WeightGroup(
                *ray.get(trainer.listen.remote()), "benchmark", "gloo", 1 + args.workers, 0
            )
            joins = [
                w.join_weight_group.remote(replace(group, rank=1 + i))
                for i, w in enumerate(workers)
            ]
            ray.get([trainer.join.remote(group), *joins])
        first[name] = sync(trainer, workers, strategy, check=True)
        sync(trainer, workers, strategy, check=False)  # a warm-up
        for _ in range(args.repeats):
            copies += sum(ray.get([worker.copy_seconds.remote(3) for worker in workers]), [])
            ray.get(trainer.move.remote())
            times[name].append(sync(trainer, workers, strategy, check=False))
    ray.shutdown()

    copy = statistics.median(copies)
    figures: dict[str, float | int | str] = {
        "copy_seconds": copy,
        "copy_gb_per_second": size / copy / 1e9,
    }
    table = Table(
        title=f"{args.megabytes} MiB of float32 weights to {args.workers} workers, {args.repeats} times"
    )
    for column in (
        "strategy",
        "seconds (median)",
        "GB/s",
        "of plain copy",
        "per worker",
        "first sync, with check",
    ):
        table.add_column(column)
    table.add_row("plain copy", f"{copy:.3f}", f"{size / copy / 1e9:.2f}", "1.00", "", "")
    for strategy in STRATEGIES:
        seconds = statistics.median(times[strategy])
        figures |= {
            f"{strategy}_seconds": seconds,
            f"{strategy}_seconds_min": min(times[strategy]),
            f"{strategy}_seconds_max": max(times[strategy]),
            f"{strategy}_gb_per_second": size / seconds / 1e9,
            f"{strategy}_fraction_of_copy": copy / seconds,
            f"{strategy}_fraction_of_copy_per_worker": args.workers * copy / seconds,
            f"{strategy}_first_seconds": first[strategy],
        }
        fractions = f"{copy / seconds:.2f}", f"{args.workers * copy / seconds:.2f}"
        table.add_row(
            strategy,
            f"{seconds:.3f}",
            f"{size / seconds / 1e9:.2f}",
            *fractions,
            f"{first[strategy]:.3f}",
        )
    figures |= {
        "megabytes": args.megabytes,
        "bucket_megabytes": args.bucket_megabytes,
        "workers": args.workers,
        "repeats": args.repeats,
        "device": "cpu",
        "backend": "gloo",
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
    }
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
