"""Training: one whole GRPO step (old logprobs, reference logprobs, update), shared prompts and images against baselines.

    python benchmarks/trainer.py [--shape small|2b] [--device cpu|cuda] [--dtype fp32|bf16] [--groups 8] [--budget 9216]
                                 [--peer-python PYTHON] [--json FILE]

All in one run, on the same rows, weights and loss (which must agree):
- shared: this trainer as it is: prompts and images once, no pass that is not needed.
- packed: the same trainer, each trajectory with its own copy of prompt and image, and a pass for the old logprobs.
- padded (CPU, or with --padded): transformers' model, rows padded, logits of all positions; attention is eager on a CPU, SDPA
  on CUDA, and autocast computes in bfloat16 where ours does.
- floor: the multiply-adds that must be done, each shared thing once, at the rate of matrix products of the same shapes.
- bf16 (a CPU with AMX): shared, computing in bfloat16 with float32 master weights, steps in turn with float32 ones.
- TRL's GRPOTrainer on the same model, rows and completion lengths, with generation (--peer-python: an interpreter that has
  trl and torchvision; benchmarks/peers/trl_step.py says which packages).
"""

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(min(os.cpu_count() or 1, 8)))

import numpy as np
import torch
import torch.distributed as dist
from baselines import floor_seconds, padded_step
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText
from workload import SHAPES, Workload, drawn_problems, geo3k_problems, make_workload, write_model

from rlinf_vl.actor.batches import BatchMaker
from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.actor.trainer import Trainer
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import (
    ActorConfig,
    ActorModelConfig,
    AlgorithmConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    OptimConfig,
)
from rlinf_vl.controller.step_plan import StepPlan, plan_step
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import freeze, load_model, vocab_size
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.packing.collator import Collator
from rlinf_vl.runtime.launch import MALLOC
from rlinf_vl.types import Group, GroupSummary, ImageRef, Request, SamplingParams

FAMILY = family_of("qwen3_vl")
CLIP, KL_BETA, TIS_CLIP = (0.2, 0.28), 0.04, 2.0
GEO3K = Path(__file__).resolve().parents[2] / "shared/data/geo3k/train.parquet"


def make_trainer(
    folder: Path, processor: Processor, args: argparse.Namespace, dtype: str
) -> Trainer:
    """The trainer of a run, on a single rank; nothing is banned, as in the padded baseline."""

    def load(dtype: torch.dtype) -> PolicyModel:
        model = load_model(folder, FAMILY, dtype)
        return PolicyModel(
            model, FAMILY, np.zeros(vocab_size(model), bool), temperature=1.0, chunk=None
        )

    p = processor
    actor = ActorConfig(
        model=ActorModelConfig(freeze_vision_tower=not args.train_tower),
        fsdp_config=FsdpConfig(
            gradient_checkpointing=args.checkpointing,
            mixed_precision=MixedPrecisionConfig(param_dtype=dtype),
        ),
        optim=OptimConfig(lr=0.0),
    )
    algorithm = with_presets(
        AlgorithmConfig(
            clip_ratio_low=CLIP[0],
            clip_ratio_high=CLIP[1],
            kl_beta=KL_BETA,
            importance_sampling_clip=TIS_CLIP,
        )
    )
    return Trainer(
        load,
        Collator(FAMILY, p.image_tokens, p.pixels, p.pad_id),
        Mesh.make(args.device),
        actor,
        algorithm,
        max_tokens=args.budget,
        total_steps=1,
    )


def sharing_nothing(trainer: Trainer, pixels: Callable) -> Trainer:
    """The same trainer with each trajectory's own prompt, with `pixels` in every micro-batch, and a pass for old logprobs."""
    packed = copy.copy(trainer)
    packed.algorithm = replace(trainer.algorithm, recompute_logprobs="true")
    collate = replace(trainer.batches.collate, share_prompts=False, pixels=pixels)
    packed.batches = BatchMaker(trainer.policy, collate, None, trainer.batches.max_tokens)
    return packed


def step(trainer: Trainer, plan: StepPlan, groups: list[Group]) -> float:
    """One optimizer step, images and all; returns the loss."""
    if trainer.batches.cache is not None:
        trainer.batches.cache.clear()
    minibatches = [ranks[0] for ranks in plan.minibatches]
    sums, _ = trainer.update(dict(enumerate(groups)), minibatches, plan.advantages)
    if trainer.mesh.device == "cuda":
        torch.cuda.synchronize()
    return sums.compute()["actor/loss"]


def logprobs(trainer: Trainer, plan: StepPlan, groups: list[Group]) -> torch.Tensor:
    """Of every response token, for comparing dtypes."""
    batches = trainer.batches.without_cache()(
        plan.minibatches[0][0], dict(enumerate(groups)), plan.advantages
    )
    with torch.no_grad():
        return torch.cat([trainer.policy(batch)[0].cpu() for batch, _ in batches])


def plan_of(
    groups: list[Group], args: argparse.Namespace, *, ranks: int = 1, share: bool = True
) -> StepPlan:
    return plan_step(
        [GroupSummary.of(g, placeholder_ids=-1) for g in groups],
        with_presets(AlgorithmConfig()),
        ranks=ranks,
        budget=args.budget,
        micro_batch_size=None,
        share_prompts=share,
    )


def own_images(groups: list[Group]) -> list[Group]:
    """The same groups as many groups of one trajectory with images of its own: what shares nothing."""
    return [
        replace(g, id=f"{g.id}/{i}", trajectories=(t,)).with_images(
            {image.hash: ImageRef(f"{image.hash}/{i}", image.data) for image, _ in g.images}
        )
        for g in groups
        for i, t in enumerate(g.trajectories)
    ]


def timed(step: Callable[[], float], repeats: int) -> tuple[float, float, list[float]]:
    """(median seconds, loss, all seconds) of `repeats` steps after one that warms up."""
    loss, seconds = step(), []
    for _ in range(repeats):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), loss, seconds


def generation_seconds(
    model, work: Workload, processor: Processor, pixels: Callable, repeats: int, device: str
) -> float:
    """Seconds in which the torch engine, on `device`, samples responses of the workload's lengths."""
    targets = {
        g * 1000 + i: n for g, lengths in enumerate(work.lengths) for i, n in enumerate(lengths)
    }

    class ExactLengths(TorchEngine):
        def _record(self, first, ids, logprobs):
            super()._record(first, ids, logprobs)
            for row in self.rows[first:]:
                if not row.done and len(row.ids) >= targets[row.owner.request.seeds[row.place]]:
                    self._finish(row, "length")

    engine = ExactLengths(
        model,
        FAMILY,
        banned=processor.banned_ids(vocab_size(model)),
        pixels=pixels,
        image_tokens=processor.image_tokens,
        max_running=len(targets),
        device=device,
    )
    sampling = SamplingParams(max_new_tokens=max(targets.values()))
    requests = [
        Request(
            g.prefix,
            tuple(image for image, _ in g.images),
            np.array([grid for _, grid in g.images]),
            sampling,
            tuple(k * 1000 + i for i in range(len(g.trajectories))),
        )
        for k, g in enumerate(work.groups)
    ]
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        done = engine.generate(requests)
        seconds.append(time.perf_counter() - start)
        assert [[len(s.ids) for s in c.samples] for c in done] == work.lengths
    engine.close()
    return statistics.median(seconds)


def peer(python: str, folder: Path, work: Workload, args: argparse.Namespace) -> dict:
    """Run TRL on the same rows; its figures."""
    (folder / "images").mkdir()
    rows = []
    for i, (problem, lengths) in enumerate(zip(work.problems, work.lengths, strict=True)):
        (folder / f"images/{i}.png").write_bytes(problem.images[0].data)
        text = "".join(
            p["text"] for m in problem.messages for p in m["content"] if p["type"] == "text"
        )
        rows.append({"image": f"images/{i}.png", "text": text, "lengths": lengths})
    settings = {
        "groups": rows,
        "samples": args.samples,
        "threads": torch.get_num_threads(),
        "steps": max(1, args.repeats - 2),
    }
    settings |= {
        "micro_groups": args.peer_micro_groups,
        "beta": KL_BETA,
        "dtype": "float32",
        "freeze_vision": not args.train_tower,
    }
    (folder / "rows.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("peers") / "trl_step.py"
    subprocess.run([python, str(script), str(folder)], check=True)
    return json.loads((folder / "peer.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="compute; bf16 on CUDA, fp32 on CPU"
    )
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--budget", type=int, default=9216, help="tokens per micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--checkpointing",
        choices=("none", "selective", "full"),
        default="none",
        help="what is recomputed",
    )
    parser.add_argument("--train-tower", action="store_true")
    parser.add_argument(
        "--data",
        type=Path,
        default=GEO3K,
        help="train.parquet of Geometry3K; drawn images where absent",
    )
    parser.add_argument(
        "--padded",
        action=argparse.BooleanOptionalAction,
        help="the padded baseline (default: on a CPU)",
    )
    parser.add_argument(
        "--peer-micro-groups", type=int, default=1, help="groups in a device batch of the peer"
    )
    parser.add_argument("--peer-python", help="interpreter with TRL")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="the device's peak in this dtype, for MFU (default: measured)",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    if args.peer_python and args.device != "cpu":
        parser.error("--peer-python: TRL is run on the CPU; add --device cpu")
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    args.padded = args.padded if args.padded is not None else args.device == "cpu"

    join_ranks(args.device)
    figures: dict = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), args, figures)
    finally:  # what was measured before something failed is not lost
        report(figures, args)
    dist.destroy_process_group()


def report(figures: dict, args: argparse.Namespace) -> None:
    table = Table("figure", "value", title=f"{args.shape} on {args.device}, {args.dtype}")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(folder: Path, args: argparse.Namespace, figures: dict) -> None:
    """Run everything that `args` asks for; `figures` grows as it goes."""
    console, rng = Console(stderr=True), np.random.default_rng(0)
    write_model(folder / "model", args.shape)
    processor = Processor(folder / "model", FAMILY)
    trainer = make_trainer(folder / "model", processor, args, args.dtype)
    real = args.data.is_file()
    problems = (
        geo3k_problems(args.data, 8 * args.groups, rng)
        if real
        else drawn_problems(8 * args.groups, rng)
    )
    work = make_workload(
        problems,
        processor,
        processor.banned_ids(vocab_size(trainer.policy.model)),
        args.samples,
        rng,
    )
    if len(work.groups) < args.groups:
        raise SystemExit(f"--groups: {args.groups} asked for, the data gives {len(work.groups)}")
    work = Workload(work.problems[: args.groups], work.groups[: args.groups])
    groups, answers = work.groups, work.response_tokens
    pixels = PixelCache(processor.pixels)
    copies = PixelCache(lambda image: pixels(ImageRef(image.hash.split("/")[0], image.data)), 2**33)

    console.log(f"{args.groups} groups, {answers} response tokens; shared")
    plan = plan_of(groups, args)
    two = plan_of(groups, args, ranks=2)
    shared, loss, all_shared = timed(lambda: step(trainer, plan, groups), args.repeats)
    figures |= {
        "shape": args.shape,
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in trainer.policy.parameters()),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "rows": "geo3k" if real else "drawn",
        "groups": args.groups,
        "samples": args.samples,
        "budget": args.budget,
        "prompt_tokens_mean": float(np.mean([g.prefix_length for g in groups])),
        "response_tokens_mean": answers / args.groups / args.samples,
        "shared_seconds": shared,
        "shared_seconds_min": min(all_shared),
        "shared_response_tokens_per_second": answers / shared,
        "packing_fill": plan.metrics["packing/fill"],
        "packing_repeated": plan.metrics["packing/repeated"],
        "micro_batches": plan.metrics["packing/micro_batches"],
        "rank_imbalance": two.metrics["packing/imbalance"],
    }
    if args.device == "cuda":
        figures["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30

    console.log("floor")
    floor = floor_seconds(
        trainer.policy.model,
        FAMILY,
        groups,
        int(figures["micro_batches"]),
        reference=True,
        frozen_tower=not args.train_tower,
        device=args.device,
        dtype=torch.bfloat16 if args.dtype == "bf16" else torch.float32,
    )
    seconds = {name: value for name, value in floor.items() if name.endswith("_seconds")}
    work_done = 2 * sum(value for name, value in floor.items() if name.endswith("_multiply_adds"))
    rate = work_done / sum(seconds.values())
    peak = args.peak_tflops * 1e12 if args.peak_tflops else rate
    figures |= {f"floor_{name}": value for name, value in seconds.items()}
    figures |= {
        "floor_seconds": sum(seconds.values()),
        "floor_fraction": sum(seconds.values()) / shared,
        "matmul_tflops": rate / 1e12,
        "mfu": work_done / shared / peak,
        "peak_tflops": peak / 1e12,
    }

    console.log("packed")
    apart = own_images(groups)
    values = [(turns,) for row in plan.advantages for turns in row]
    packed_plan = replace(plan_of(apart, args, share=False), advantages=tuple(values))
    alone = sharing_nothing(trainer, copies)
    packed, packed_loss, _ = timed(lambda: step(alone, packed_plan, apart), args.repeats)
    assert abs(loss - packed_loss) < (1e-4 if args.dtype == "fp32" else 0.05), (loss, packed_loss)
    figures |= {"packed_seconds": packed, "ratio_shared_vs_packed": packed / shared}

    if args.padded:
        console.log("padded")
        if args.device == "cuda":  # its four copies of a 2B model need the room
            del trainer, alone
            gc.collect()
            torch.cuda.empty_cache()
        model, reference = (
            AutoModelForImageTextToText.from_pretrained(
                folder / "model",
                dtype=torch.float32,
                attn_implementation="sdpa" if args.device == "cuda" else "eager",
            )
            for _ in range(2)
        )
        model, reference = model.to(args.device), reference.to(args.device)
        if not args.train_tower:
            freeze(model, FAMILY)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
        padded_once = lambda: padded_step(  # noqa: E731
            model, reference, optimizer, groups, plan.advantages, pixels, processor.image_token_id, processor.pad_id,
            clip=CLIP, kl_beta=KL_BETA, tis_clip=TIS_CLIP,
        )  # fmt: skip
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
            padded, padded_loss, _ = timed(padded_once, max(1, args.repeats - 2))
        assert abs(loss - padded_loss) < 1e-4 or args.dtype != "fp32", (loss, padded_loss)
        figures |= {"padded_seconds": padded, "ratio_shared_vs_padded": padded / shared}
        del model, reference, optimizer

    if args.device == "cpu" and args.dtype == "fp32" and torch.cpu._is_amx_tile_supported():
        console.log("bf16")
        exact = logprobs(trainer, plan, groups)
        half = make_trainer(folder / "model", processor, args, "bf16")
        in_turn = [
            [timed(lambda t=t: step(t, plan, groups), 1)[0] for t in (trainer, half)]
            for _ in range(args.repeats)
        ]
        fp32, bf16 = np.median(in_turn, axis=0).tolist()
        difference = (logprobs(half, plan, groups) - exact).abs()
        figures |= {"bf16_seconds": bf16, "ratio_bf16_vs_fp32": fp32 / bf16}
        figures |= {
            "bf16_abs_diff_mean": float(difference.mean()),
            "bf16_abs_diff_max": float(difference.max()),
        }

    if args.peer_python:
        console.log("TRL")
        theirs = peer(args.peer_python, folder, work, args)
        console.log("generation")
        model = load_model(folder / "model", FAMILY, torch.float32)
        generate = generation_seconds(
            model, work, processor, processor.pixels, args.repeats, args.device
        )
        figures |= {f"trl_{k}": v for k, v in theirs.items()}
        figures |= {
            "generate_seconds": generate,
            "ratio_vs_trl_train": theirs["train_seconds"] / shared,
            "ratio_vs_trl_step": theirs["step_seconds"] / (generate + shared),
        }


if __name__ == "__main__":
    main()
