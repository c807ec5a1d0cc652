"""Ranks that share a row's tokens: activation memory of each rank, and tokens a second, for one rank, two and four.

    python benchmarks/context_parallel.py [--shape small] [--tokens 4096] [--sizes 1 2 4] [--repeats 3] [--json FILE]

One long trajectory of several images (features of a frozen tower, as from its cache) is one row; forward, loss and backward of it
by the trainer's own parts, on ranks that are processes over gloo. Memory is that of what forward keeps for backward, and the
most that is alive at once beside weights and their gradients, counted by PyTorch's dispatcher. Ranks share the cores of this
machine: with fewer cores than ranks, time says what the exchange costs, not what a cluster gains. Losses must agree.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from workload import SHAPES, write_model

from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.loading import load_model
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.parts import row_part
from rlinf_vl.tools.memory.trace import LiveBytes
from rlinf_vl.transport.rendezvous import find, listen
from rlinf_vl.types import MicroBatch

FAMILY, MERGE = FAMILIES["qwen3_vl"], 2


def row(tokens: int, vocabulary: int) -> MicroBatch:
    """One trajectory: an image of 256 tokens in each 512, the other half sampled."""
    random = np.random.default_rng(0)
    at = np.arange(tokens)
    shown, sampled = at[at % 512 < 256], at[at % 512 >= 256]
    images = len(shown) // 256
    return MicroBatch(
        ids=random.integers(0, vocabulary, tokens),
        positions=np.tile(at, (4, 1)),
        cu_seqlens=np.array([0, tokens]),
        prefix=np.array([-1]),
        copies=np.array([1]),
        row_columns={},
        predict=sampled - 1,
        targets=random.integers(0, vocabulary, len(sampled)),
        trajectories=np.zeros(len(sampled), np.int64),
        turns=np.zeros(len(sampled), np.int64),
        advantages=random.standard_normal(len(sampled)).astype(np.float32),
        rollout_logprobs=None,
        versions=np.zeros(len(sampled), np.int32),
        columns={},
        images=tuple(f"image {i}" for i in range(images)),
        pixel_values=None,
        grids=np.tile(np.array([1, 16 * MERGE, 16 * MERGE]), (images, 1)),
        image_positions=shown,
        image_features=np.arange(len(shown)),
        image_runs=np.stack([shown[::256], shown[255::256] + 1], axis=1),
    )


def work(
    rank: int, size: int, address: tuple[str, int], folder: str, options: argparse.Namespace, out
) -> None:
    torch.set_num_threads(1)
    join_ranks("cpu", rank, size, find(address))
    mesh = Mesh.make("cpu", context=size)
    model = load_model(folder, FAMILY, torch.float32)
    model.get_submodule(FAMILY.vision_tower).requires_grad_(False)
    policy = PolicyModel(model, FAMILY, np.zeros(8, bool), temperature=1.0, chunk=None).train()
    policy.context_ranks = mesh.context_ranks
    whole = row(options.tokens, 500)
    batch = row_part(whole, rank, size, ImageTokens(-1, MERGE)) if size > 1 else whole
    layers = FAMILY.feature_layers(model.config)
    width = model.get_input_embeddings().weight.shape[1]
    random = torch.Generator().manual_seed(1)
    stack = torch.randn(layers, len(whole.image_features), width, generator=random)
    own = torch.cat([torch.arange(256) + 256 * int(name.split()[1]) for name in batch.images])
    features = VisionFeatures(stack[0, own], tuple(layer[own] for layer in stack[1:]))
    del stack
    advantages = torch.from_numpy(whole.advantages)

    def step() -> float:
        logprobs, _ = policy(batch, features)
        loss = -(logprobs * advantages).mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    loss, seconds = step(), []
    for _ in range(options.repeats):
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    live = LiveBytes([*model.parameters(), *policy.buffers(), features.tokens, *features.deepstack])
    with live:
        logprobs, _ = policy(batch, features)
        kept = live.current
        (-(logprobs * advantages).mean()).backward()
    out.put((rank, loss, kept, live.peak, float(np.median(seconds))))
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, folder: str, options: argparse.Namespace) -> tuple[float, int, int, float]:
    """(loss, bytes kept, bytes at most, seconds), the largest of any rank."""
    out = mp.get_context("spawn").SimpleQueue()
    store, address = listen("127.0.0.1")  # `store`: listens while it is referenced
    # Ends the other ranks where one has failed.
    mp.spawn(work, (size, address, folder, options, out), nprocs=size)
    found = [out.get() for _ in range(size)]
    losses = {round(loss, 4) for _, loss, *_ in found}
    assert len(losses) == 1, f"ranks differ: {losses}"
    kept, peak, seconds = (max(x[i] for x in found) for i in (2, 3, 4))
    return found[0][1], kept, peak, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    table = Table(
        "ranks",
        "kept for backward, MB",
        "of one rank's",
        "at most, MB",
        "of one rank's",
        "tokens / s",
    )
    figures: dict[str, int | float | str] = {"shape": options.shape, "tokens": options.tokens}
    first, folder = None, tempfile.mkdtemp()
    write_model(Path(folder), options.shape)
    for size in options.sizes:
        loss, kept, peak, seconds = found = measure(size, folder, options)
        first = first or found
        assert abs(loss - first[0]) < 1e-5 * max(1, abs(loss)), (
            f"loss of {size} ranks {loss}, of one {first[0]}"
        )
        ratios = kept / first[1], peak / first[2]
        speed = options.tokens / seconds
        cells = (
            f"{kept / 1e6:.1f}",
            f"{ratios[0]:.2f}",
            f"{peak / 1e6:.1f}",
            f"{ratios[1]:.2f}",
            f"{speed:,.0f}",
        )
        table.add_row(str(size), *cells)
        figures |= {
            f"kept_bytes_{size}": kept,
            f"peak_bytes_{size}": peak,
            f"tokens_per_second_{size}": speed,
        }
        figures |= {f"kept_ratio_{size}": ratios[0], f"peak_ratio_{size}": ratios[1]}
    shutil.rmtree(folder)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
