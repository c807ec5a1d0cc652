"""One step's groups from a rollout worker to two actor ranks: bytes and seconds, ours and a naive way, in the same run.

    python benchmarks/exchange.py [--groups 64] [--samples 8] [--image-kb 50] [--share 1] [--repeats 3] [--json FILE]

Ours: each group is put by the worker as it is finished, its image as an object of its own, and each rank fetches half of the
groups. Naive: every trajectory is a dict with the pixels of its image as float32 patches; the worker returns them all to
the driver, which sends each rank its half. Bytes are what Ray reports for every object written on the way. What is sent
is made beforehand, so no time is counted for pixels: the naive worker made them for every trajectory, our ranks will for
every image.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from rlinf_vl.transport.groups import GroupStore, fetch
from rlinf_vl.types import (
    Group,
    GroupSummary,
    ImageRef,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)

#: Values of a patch: 3 channels, 2 frames, 16 x 16 pixels.
PATCH = 1536


def make_groups(args: argparse.Namespace) -> list[Group]:
    """Groups with random tokens; `share` of them in a row show one image."""
    rng = np.random.default_rng(0)
    side = int(args.patches**0.5)
    grids = np.array([[1, side, args.patches // side]], np.int32)
    images = [
        ImageRef.of(rng.bytes(args.image_kb * 1000)) for _ in range(-(-args.groups // args.share))
    ]

    def trajectory(request: Request) -> Trajectory:
        ids = rng.integers(0, 150_000, args.response).astype(np.int32)
        logprobs = -rng.random(args.response).astype(np.float32)
        sequence = TokenSequence.of_sample(
            request, Sample(ids, logprobs, np.ones(len(ids), np.int32), "stop")
        )
        turn = Turn(0, args.prompt, len(sequence.ids), "stop", 1.0)
        return Trajectory((sequence,), (turn,), 1.0, {"accuracy": 1.0}, "stop", correct=True)

    groups = []
    for g in range(args.groups):
        ids = rng.integers(0, 150_000, args.prompt).astype(np.int32)
        request = Request(ids, (images[g // args.share],), grids, SamplingParams(), ())
        trajectories = tuple(trajectory(request) for _ in range(args.samples))
        groups.append(Group(f"train-1-{g}", f"data:{g}", args.prompt, trajectories, "42"))
    return groups


@ray.remote(num_cpus=0)
class Worker:
    """A rollout worker that has generated."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.groups, self.store, self.patches = make_groups(args), GroupStore(), args.patches
        self.naive: list[dict] = []

    def put(self) -> list[tuple[GroupSummary, ray.ObjectRef]]:
        out = []
        for group in self.groups:
            reference, object_bytes = self.store.put(group)
            out.append((GroupSummary.of(group, -1, object_bytes), reference))
        return out

    def release(self) -> None:
        self.store.release([group.id for group in self.groups])

    def make_naive(self) -> None:
        pixels = np.random.default_rng(0).random((self.patches, PATCH), np.float32)
        self.naive = [
            {
                "input_ids": sequence.ids.astype(np.int64),
                "response_mask": sequence.loss_mask.astype(np.int64),
                "logprobs": sequence.logprobs,
                "pixel_values": pixels.copy(),
                "image_grid_thw": np.array([grid for _, grid in sequence.images]),
                "reward": 1.0,
            }
            for group in self.groups
            for sequence in group.sequences
        ]

    def give(self) -> list[dict]:
        return self.naive


@ray.remote(num_cpus=0)
class Rank:
    """An actor rank: gets what it trains on."""

    def fetch(self, references: dict[int, ray.ObjectRef]) -> int:
        groups = fetch(references).values()
        return sum(len(image.data) > 0 for group in groups for image, _ in group.images) and len(
            groups
        )

    def take(self, trajectories: list[dict]) -> int:
        return sum(t["pixel_values"].shape[1] == PATCH for t in trajectories)


def size_of(references: list[ray.ObjectRef]) -> int:
    sizes = ray.experimental.get_local_object_locations(references).values()
    return sum(size["object_size"] for size in sizes)


def ours(worker, ranks) -> tuple[float, int, int]:
    """(seconds, bytes in the object store, bytes of arrays and distinct images)."""
    start = time.perf_counter()
    results = ray.get(worker.put.remote())
    n = len(ranks)
    shares = [
        {g: reference for g, (_, reference) in enumerate(results) if g % n == i} for i in range(n)
    ]
    ray.get([rank.fetch.remote(share) for rank, share in zip(ranks, shares, strict=True)])
    seconds = time.perf_counter() - start
    images = {name: size for summary, _ in results for name, size in summary.image_bytes.items()}
    stored, arrays = (
        sum(getattr(s, name) for s, _ in results) for name in ("object_bytes", "array_bytes")
    )
    ray.get(worker.release.remote())
    return seconds, stored, arrays + sum(images.values())


def naive(worker, ranks) -> tuple[float, int]:
    """(seconds, bytes in the object store)."""
    start = time.perf_counter()
    given = worker.give.remote()
    trajectories = ray.get(given)
    sent = [ray.put(trajectories[i :: len(ranks)]) for i in range(len(ranks))]
    ray.get([rank.take.remote(share) for rank, share in zip(ranks, sent, strict=True)])
    return time.perf_counter() - start, size_of([given, *sent])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--response", type=int, default=150, help="tokens")
    parser.add_argument("--image-kb", type=int, default=50, help="encoded size of an image")
    parser.add_argument("--patches", type=int, default=256, help="of an image, 16 x 16 pixels each")
    parser.add_argument("--share", type=int, default=1, help="groups that show one image")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    one = (
        args.groups * args.samples * (args.patches * PATCH * 4 + 20 * (args.prompt + args.response))
    )
    # What is returned, what is sent, and the same of the repeat before.
    memory = max(5 * one, 2**28)
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=memory,
        logging_level="warning",
    )
    worker, ranks = Worker.remote(args), [Rank.remote() for _ in range(args.ranks)]
    stored = unique = sent = 0
    seconds: dict[str, list[float]] = {"ours": [], "naive": []}
    try:
        for _ in range(1 + args.repeats):  # the first is a warm-up
            s, stored, unique = ours(worker, ranks)
            seconds["ours"].append(s)
        ray.get(worker.make_naive.remote())
        for _ in range(1 + args.repeats):
            s, sent = naive(worker, ranks)
            seconds["naive"].append(s)
            time.sleep(2)  # Ray frees objects once a second
    finally:
        ray.shutdown()
    ours_s, naive_s = (statistics.median(seconds[way][1:]) for way in ("ours", "naive"))
    figures = {
        "ours_seconds": ours_s,
        "naive_seconds": naive_s,
        "ours_object_store_bytes": stored,
        "unique_bytes": unique,
        "naive_object_store_bytes": sent,
        "ratio_bytes_vs_naive": sent / stored,
        "ratio_seconds_vs_naive": naive_s / ours_s,
        "object_store_over_unique": stored / unique,
        "groups": args.groups,
        "samples": args.samples,
        "prompt_tokens": args.prompt,
        "response_tokens": args.response,
        "image_kb": args.image_kb,
        "patches": args.patches,
        "groups_per_image": args.share,
        "ranks": args.ranks,
        "repeats": args.repeats,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "ray": ray.__version__,
    }
    table = Table(title=f"{args.groups} groups of {args.samples} to {args.ranks} ranks")
    for column in ("", "seconds (median)", "MB in the object store", "of unique bytes"):
        table.add_column(column)
    table.add_row("ours", f"{ours_s:.3f}", f"{stored / 1e6:.2f}", f"{stored / unique:.3f}")
    table.add_row("naive", f"{naive_s:.3f}", f"{sent / 1e6:.2f}", f"{sent / unique:.0f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
