"""Delta sync: bytes and seconds of syncs behind real optimizer steps, against the whole weights, and equality after all of them.

    python benchmarks/delta_sync.py [--shape small|tiny] [--lr 1e-6 1e-5] [--steps 50] [--tokens 1024] [--toy-steps 20] [--json FILE]

- A Qwen3-VL of 46 million random weights (`--shape small`) is trained on random responses with each learning rate, AdamW and a
  clipped gradient, from float32 weights; its engine's are bfloat16. Behind each step the sender offers what changed
  (`rollout.weight_sync: delta`), and a second model takes it. In the end both must be equal, bit for bit. Seconds are the sender's
  (comparing, storing) and the receiver's (writing); beside them those of sending and writing the whole.
- The toy is trained by a run as users start one (`toy-grpo-cpu`, with its learning rate and with 1e-6, engines in bfloat16), whose
  metrics have the bytes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
from rich.console import Console
from rich.table import Table
from trainer import make_trainer, plan_of, step
from workload import SHAPES, drawn_problems, make_workload, write_model

import rlinf_vl
from rlinf_vl.actor.mesh import join_ranks
from rlinf_vl.models.loading import vocab_size
from rlinf_vl.models.processing import Processor
from rlinf_vl.weights.buckets import BUCKET_BYTES, unpack
from rlinf_vl.weights.delta import DeltaSender, patches
from rlinf_vl.weights.object_store import ObjectStoreSender


def model_figures(folder: Path, lr: float, args: argparse.Namespace) -> dict[str, float]:
    """Of `args.steps` syncs behind steps with this learning rate, the first one, which is whole, left out."""
    from rlinf_vl.models.families import family_of

    processor = Processor(folder, family_of("qwen3_vl"))
    args.budget, args.device, args.train_tower, args.checkpointing = (
        args.tokens,
        "cpu",
        False,
        "none",
    )
    trainer = make_trainer(folder, processor, args, "fp32")
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = lr
    trainer.scheduler.base_lrs = [lr] * len(trainer.scheduler.base_lrs)
    banned = processor.banned_ids(vocab_size(trainer.policy.model))
    work = make_workload(
        drawn_problems(8, np.random.default_rng(0)), processor, banned, 2, np.random.default_rng(0)
    )
    groups = work.groups[:1]
    plan = plan_of(groups, args)

    def gather(device: str):
        return trainer.weights(torch.bfloat16, device)

    def parts():
        return trainer.parts(torch.bfloat16)

    delta, whole = (
        kind(gather, parts, 0, 1, "cpu", BUCKET_BYTES) for kind in (DeltaSender, ObjectStoreSender)
    )
    engine = {name: value.clone() for name, value in gather("cpu")}
    delta.offer(0, True)
    sent, shares, seconds = [], [], {"offer": [], "write": [], "whole_offer": [], "whole_write": []}
    for number in range(1, args.steps + 1):
        step(trainer, plan, groups)
        offer = delta.offer(number, False)
        begun = time.perf_counter()
        for bucket in patches(ray.get(list(offer.labels)), "cpu"):
            for name, patch in bucket.items():
                patch.apply(engine[name])
        seconds["write"].append(time.perf_counter() - begun)
        seconds["offer"].append(offer.seconds)
        sent.append(offer.sent_bytes)
        shares.append(offer.sent_bytes / offer.full_bytes)
        if number % 10 == 1:
            other = whole.offer(number, False)
            begun = time.perf_counter()
            copies = {
                n: v.clone()
                for label in ray.get(list(other.labels))
                for n, v in unpack(label).items()
            }
            seconds["whole_write"].append(time.perf_counter() - begun)
            seconds["whole_offer"].append(other.seconds)
            assert copies.keys() == engine.keys()
    moved = 0
    for name, value in gather("cpu"):
        assert torch.equal(engine[name].view(torch.int16), value.view(torch.int16)), (
            f"{name} is not what was sent"
        )
        moved += value.numel()
    return {
        "lr": lr,
        "values": moved,
        "whole_megabytes": 2 * moved / 1e6,
        "delta_megabytes_mean": statistics.mean(sent) / 1e6,
        "delta_megabytes_max": max(sent) / 1e6,
        "share_mean": statistics.mean(shares),
        "share_first": shares[0],
        "share_last": shares[-1],
        "syncs_equal": args.steps,
    } | {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}


def toy_figures(lr: float | None, steps: int, folder: str) -> dict[str, float]:
    """Of a toy run; None: with its own learning rate."""
    overrides = [
        "rollout.weight_sync=delta",
        "rollout.model.precision=bf16",
        f"runner.max_steps={steps}",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        f"runner.output_dir={folder}",
        f"runner.experiment_name=toy-{lr or 'own'}",
    ]
    run = rlinf_vl.train("toy-grpo-cpu", overrides + ([f"actor.optim.lr={lr}"] if lr else []))
    rows = run.metrics
    sent, share, waited = (
        [float(x) for x in rows[name]] for name in ("sync/bytes", "sync/bytes_share", "time/sync")
    )
    return {
        "whole_megabytes": sent[0] / 1e6,
        "delta_megabytes_mean": statistics.mean(sent[1:]) / 1e6,
        "share_mean": statistics.mean(share[1:]),
        "sync_seconds": statistics.median(waited[1:]),
        "steps": steps,
    } | ({"lr": lr} if lr else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--toy-steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {"shape": args.shape, "steps": args.steps, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        if args.toy_steps:
            for name, lr in (("toy", None), ("toy_1e-6", 1e-6)):
                figures[name] = toy_figures(lr, args.toy_steps, folder)
            ray.shutdown()  # a run from Python leaves Ray to the next one
        torch.set_num_threads(1)
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=2**30,
            logging_level="warning",
        )
        join_ranks("cpu")
        write_model(Path(folder) / "model", args.shape)
        for lr in args.lr if args.steps else ():
            figures[f"{args.shape}_{lr:g}"] = model_figures(Path(folder) / "model", lr, args)
        ray.shutdown()
    table = Table(title="Bytes of a sync: what changed, against all trained weights in bfloat16")
    for column in (
        "weights",
        "whole MB",
        "delta MB",
        "share",
        "comparing s",
        "writing s",
        "whole: sending s",
        "writing s",
    ):
        table.add_column(column)
    for name, row in figures.items():
        if isinstance(row, dict):
            keys = ("offer_seconds", "write_seconds", "whole_offer_seconds", "whole_write_seconds")
            seconds = [f"{row[key]:.3f}" if key in row else "" for key in keys]
            share = f"{row['share_mean']:.2%}"
            table.add_row(
                name,
                f"{row['whole_megabytes']:.2f}",
                f"{row['delta_megabytes_mean']:.3f}",
                share,
                *seconds,
            )
    Console().print(table)
    if args.json:
        flat = {name: value for name, value in figures.items() if not isinstance(value, dict)}
        for name, row in figures.items():
            flat |= (
                {f"{name}: {key}": value for key, value in row.items()}
                if isinstance(row, dict)
                else {}
            )
        args.json.write_text(json.dumps(flat, indent=1) + "\n")


if __name__ == "__main__":
    main()
