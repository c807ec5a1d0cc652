"""Generation: the torch engine (and SGLang) against transformers' `generate(num_return_sequences=…)`, same prompts, same run.

    python benchmarks/rollout.py [--sglang] [--groups 64] [--samples 8] [--new-tokens 24] [--repeats 5] [--device cuda]
                                 [--json FILE]

Greedy ids are compared first: in float32 (on a CPU) they must be identical; in bfloat16 (on CUDA, whose attention kernels take
nothing wider) near ties may differ. Then all sample, in turn, and the medians of tokens per second are set against each
other. transformers counts every row until its own end, as the engines do. `--sglang` needs the environment that
`bash requirements/install.sh --sglang` makes.
"""

import argparse
import json
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText

from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Request, SamplingParams


def left_padded(
    requests: list[Request], processor: Processor, device: str
) -> dict[str, torch.Tensor]:
    """The batch that `generate` wants: prompts padded on the left, every image's pixels."""
    longest = max(len(r.ids) for r in requests)
    ids = torch.full((len(requests), longest), processor.pad_id)
    mask = torch.zeros_like(ids)
    for row, r in enumerate(requests):
        ids[row, longest - len(r.ids) :] = torch.from_numpy(r.ids.astype(np.int64))
        mask[row, longest - len(r.ids) :] = 1
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == processor.image_token_id).int(),
        "pixel_values": torch.from_numpy(
            np.concatenate([processor.pixels(i) for r in requests for i in r.images])
        ),
        "image_grid_thw": torch.from_numpy(
            np.concatenate([r.image_grids for r in requests]).astype(np.int64)
        ),
    }
    return {name: value.to(device) for name, value in batch.items()}


def responses(out: torch.Tensor, prompt: int, stop: tuple[int, ...]) -> list[list[int]]:
    """Response ids of each row, up to and with its stop id."""
    rows = []
    for row in out[:, prompt:].tolist():
        end = next((i for i, token in enumerate(row) if token in stop), len(row) - 1)
        rows.append(row[: end + 1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy", help="checkpoint folder in HF format, or `toy`")
    parser.add_argument("--data", default="toy", help="dataset, as in data.val_data_paths")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sglang", action="store_true", help="measure the SGLang engine too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32

    path = args.model
    if path == "toy":
        from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

        path = str(toy_checkpoint_path())
    family = family_of("qwen3_vl")
    processor = Processor(path, family)
    renderer = Renderer(processor)
    dataset = ProblemDataset([args.data], "train")
    sampling = SamplingParams(max_new_tokens=args.new_tokens, stop_ids=processor.stop_ids)
    requests = []
    for i in range(args.groups):
        problem = dataset[i * 7 % len(dataset)]
        ids, grids = renderer.prompt(problem.messages, problem.images)
        requests.append(
            Request(
                ids,
                problem.images,
                grids,
                sampling,
                tuple(range(i * 1000, i * 1000 + args.samples)),
            )
        )

    model = load_model(path, family, dtype)
    banned = processor.banned_ids(vocab_size(model))
    pixels = PixelCache(processor.pixels)
    engine = TorchEngine(
        model,
        family,
        banned=banned,
        pixels=pixels,
        image_tokens=processor.image_tokens,
        max_running=args.groups * args.samples,
        device=args.device,
    )
    engines = {"torch engine": engine}
    if args.sglang:
        from rlinf_vl.engines.sglang.engine import SglangEngine
        from rlinf_vl.engines.sglang.settings import Settings

        settings = Settings(
            model_path=path,
            context_length=max(len(r.ids) for r in requests) + args.new_tokens,
            max_running=args.groups * args.samples,
            dtype=dtype,
            device=args.device,
            cpu_threads=args.threads,
        )
        engines["SGLang"] = SglangEngine(
            settings, family, banned=banned, pixels=pixels, image_tokens=processor.image_tokens
        )
    baseline = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa"
    )
    baseline = baseline.to(args.device).eval()
    options = {
        "max_new_tokens": args.new_tokens,
        "eos_token_id": list(processor.stop_ids),
        "pad_token_id": processor.pad_id,
        "suppress_tokens": np.flatnonzero(banned).tolist(),
        "top_k": 0,
        "top_p": 1.0,
        "temperature": 1.0,
    }

    def transformers_generate(**kwargs) -> list[list[int]]:
        batch = left_padded(requests, processor, args.device)
        baseline.model.rope_deltas = None
        with torch.inference_mode():
            out = baseline.generate(**batch, **(options | kwargs))
        return responses(out, batch["input_ids"].shape[1], processor.stop_ids)

    def engine_generate(name: str, greedy: bool = False) -> list[list[int]]:
        if greedy:
            zero = SamplingParams(0.0, max_new_tokens=args.new_tokens, stop_ids=processor.stop_ids)
            todo = [Request(r.ids, r.images, r.image_grids, zero, (0,)) for r in requests]
        else:
            todo = requests
        return [s.ids.tolist() for c in engines[name].generate(todo) for s in c.samples]

    expected = transformers_generate(do_sample=False, temperature=None, top_p=None, top_k=None)
    same = {name: engine_generate(name, greedy=True) == expected for name in engines}
    runs = {name: partial(engine_generate, name) for name in engines}
    runs["transformers"] = partial(
        transformers_generate, do_sample=True, num_return_sequences=args.samples
    )
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for name, run in runs.items():
            start = time.perf_counter()
            tokens = sum(len(row) for row in run())
            if repeat:
                speeds[name].append(tokens / (time.perf_counter() - start))
    for engine in engines.values():
        engine.close()

    figures = {
        "groups": args.groups,
        "samples": args.samples,
        "threads": args.threads,
        "device": args.device,
        "dtype": str(dtype),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "transformers_tokens_per_second": statistics.median(speeds["transformers"]),
    }
    for name in engines:
        key = name.lower().replace(" ", "_")
        ratios = [a / b for a, b in zip(speeds[name], speeds["transformers"], strict=True)]
        figures |= {
            f"{key}_greedy_ids_identical": same[name],
            f"{key}_tokens_per_second": statistics.median(speeds[name]),
            f"{key}_ratio_vs_transformers": statistics.median(ratios),
            f"{key}_ratio_min": min(ratios),
        }
    table = Table(
        title=f"{args.groups} groups × {args.samples} samples, {args.new_tokens} new tokens at most"
    )
    for column in ("generator", "tokens/s (median)", "ratio", "greedy ids"):
        table.add_column(column)
    base = statistics.median(speeds["transformers"])
    for name, measured in speeds.items():
        median = statistics.median(measured)
        verdict = {True: "identical", False: "DIFFERENT"}.get(same.get(name), "-")
        table.add_row(name, f"{median:,.0f}", f"{median / base:.2f}", verdict)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
