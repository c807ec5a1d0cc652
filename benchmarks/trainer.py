"""Training: one GRPO update of a randomly initialised Qwen3-VL on geometry-like lengths. Tokens/s, MFU, peak memory.

    python benchmarks/trainer.py [--shape 2b|small] [--device cuda|cpu] [--groups 16] [--budget 16384] [--json FILE]

The step is the trainer's own (`actor.update.update` under FSDP2 on one rank). MFU counts multiply-adds that the step needs,
vision tower included and recomputation excluded, over `--peak-tflops` (or, where that is not given, over the matmul rate
measured on this device in the same run).
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rlinf_vl.actor.fsdp import make_optimizer, make_scheduler, shard
from rlinf_vl.actor.update import LossSettings, MiniBatch, update
from rlinf_vl.controller.step_plan import plan_step
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import freeze_vision, use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import Group, GroupSummary, ImageRef, Trajectory

IMAGE, MERGE, PATCH = 5, 2, 16
SHAPES = {
    # Qwen3-VL-2B-Instruct's config.json
    "2b": (
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        {"hidden_size": 1024, "depth": 24, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 2048}
        | {"deepstack_visual_indexes": [5, 11, 17]},
        [24, 20, 20],
    ),
    "small": (
        {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12}
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
        {"hidden_size": 192, "depth": 6, "num_heads": 4, "intermediate_size": 512, "out_hidden_size": 384}
        | {"deepstack_visual_indexes": [1, 3]},
        [12, 10, 10],
    ),
}


def make_model(shape: str) -> Qwen3VLForConditionalGeneration:
    text, vision, sections = SHAPES[shape]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope, "tie_word_embeddings": True, "max_position_embeddings": 32768},
        vision_config=vision | {"patch_size": PATCH, "spatial_merge_size": MERGE, "num_position_embeddings": 2304},
        image_token_id=IMAGE,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config)


def make_groups(n: int, samples: int, vocab: int, rng: np.random.Generator) -> list[Group]:
    """One geometry-sized image and 60–160 text ids a prompt; long-tailed responses of 20–1,000 ids."""
    groups = []
    for g in range(n):
        rows, columns = rng.integers(6, 20), rng.integers(6, 24)
        text = rng.integers(10, vocab, rng.integers(60, 160))
        prompt = np.concatenate([text[:8], np.full(rows * columns, IMAGE), text[8:]]).astype(np.int32)
        trajectories = []
        for _ in range(samples):
            length = int(np.clip(rng.lognormal(5.3, 0.7), 20, 1000))
            trajectories.append(
                Trajectory(
                    ids=rng.integers(10, vocab, length).astype(np.int32),
                    response_mask=np.ones(length, bool),
                    logprobs=np.full(length, -np.log(vocab), np.float32),
                    versions=np.zeros(length, np.int32),
                    reward=float(rng.integers(0, 2)),
                    finish_reason="stop",
                )
            )
        grid = np.array([[1, rows * MERGE, columns * MERGE]], np.int32)
        groups.append(Group(str(g), str(g), prompt, (ImageRef.of(str(g).encode()),), grid, tuple(trajectories)))
    return groups


def step_flops(model, groups: list[Group], frozen_tower: bool) -> float:
    """Floating-point operations of forward and backward that the packed step needs (2 per multiply-add, ×3 with backward)."""
    c, v = model.config.text_config, model.config.vision_config
    blocks = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2)
    head = c.vocab_size * c.hidden_size
    tower = sum(p.numel() for n, p in model.named_parameters() if ".visual." in n and p.ndim >= 2)
    total = 0.0
    for g in groups:
        patches = int(g.image_grids.prod())
        vision = 2 * patches * tower + 4 * v.depth * v.hidden_size * patches**2
        total += vision * (1 if frozen_tower else 3)
        for t in g.trajectories:
            length = len(g.prompt_ids) + len(t.ids)
            attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * length**2  # causal: half of 4
            total += 3 * (2 * blocks * length + 2 * head * len(t.ids) + attention)
    return total


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matmul on this device."""
    n = 8192 if device == "cuda" else 1024
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default=None, help="compute; bf16 on CUDA, fp32 on CPU")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--train-tower", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="the device's peak in this dtype; measured where not given")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.HashStore()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    family = family_of("qwen3_vl")
    model = use_packed_attention(make_model(args.shape), family)
    if not args.train_tower:
        freeze_vision(model, family)
    vocab = model.config.text_config.vocab_size
    groups = make_groups(args.groups, args.samples, vocab, np.random.default_rng(0))
    flops = step_flops(model, groups, not args.train_tower)
    banned = np.arange(vocab) == IMAGE
    policy = PolicyModel(model, family, banned, temperature=1.0, chunk=1024).to(args.device).train()
    shard(
        policy,
        init_device_mesh(args.device, (1,)),
        param_dtype=dtype,
        reduce_dtype="fp32",
        gradient_checkpointing=not args.no_checkpointing,
    )
    optimizer = make_optimizer(policy, lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    scheduler = make_scheduler(optimizer, "constant", warmup=0, total=1, min_ratio=0.0)
    plan = plan_step(
        [GroupSummary.of(g) for g in groups],
        ranks=1,
        n_minibatches=1,
        budget=args.budget,
        micro_batch_size=None,
        normalize_advantages=True,
        aggregation="token-mean",
    )
    patches = {g.images[0].hash: int(g.image_grids.prod()) for g in groups}
    noise = np.random.default_rng(1).normal(size=(max(patches.values()), 3 * 2 * PATCH**2)).astype(np.float32)
    collate = Collator(family, IMAGE, MERGE, lambda image: noise[: patches[image.hash]], 0)
    mini = plan.minibatches[0][0]

    def batches():
        for items, vision in zip(mini.micro_batches, mini.run_vision, strict=True):
            members = [Member(groups[i.group], i.index, plan.advantages[i.group][i.index]) for i in items]
            yield collate(members, run_vision=vision)

    settings = LossSettings("token-mean", 0.2, 0.28, None, 0.0, "k3", 0.0, 2.0, "token", "current")
    seconds = []
    for step in range(args.steps + 1):  # the first is a warm-up
        start = time.perf_counter()
        update(
            policy,
            None,
            optimizer,
            scheduler,
            [MiniBatch(batches, mini.denominator)],
            settings,
            world_size=1,
            max_grad_norm=1.0,
        )
        if args.device == "cuda":
            torch.cuda.synchronize()
        if step:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    measured = matmul_rate(args.device, torch.bfloat16 if dtype == "bf16" else torch.float32)
    peak = args.peak_tflops * 1e12 if args.peak_tflops else measured
    tokens = sum(len(g.prompt_ids) + len(t.ids) for g in groups for t in g.trajectories)
    figures = {
        "shape": args.shape,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
        "dtype": dtype,
        "step_seconds": median,
        "tokens_per_second": tokens / median,
        "response_tokens_per_second": sum(len(t.ids) for g in groups for t in g.trajectories) / median,
        "mfu": flops / median / peak,
        "peak_tflops": peak / 1e12,
        "measured_matmul_tflops": measured / 1e12,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None,
        "packing_fill": plan.metrics["packing/fill"],
        "micro_batches": len(mini.micro_batches),
        "torch": torch.__version__,
    }
    table = Table("figure", "value", title=f"{args.shape} on {figures['device']}, {dtype}")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
