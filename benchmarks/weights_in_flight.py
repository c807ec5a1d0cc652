"""Weights that arrive while responses are sampled: what an update costs, and whether each token is of the version that it says.

    python benchmarks/weights_in_flight.py [--sglang] [--groups 16] [--samples 8] [--new-tokens 256] [--every 1.0] [--repeats 3]
                                           [--check 8] [--json FILE]

The toy's questions are answered without a stop id, undisturbed and with two sets of weights that take turns every so many seconds,
with what was computed of a response computed again and with it kept (`rollout.kv_after_update`). Where it is computed again, the
logprobs of some responses are compared, token by token, with those of transformers' own forward by the weights that sampled the
token; `largest_difference` must be float noise. `--sglang` needs the environment that `bash requirements/install.sh --sglang` makes.
"""

import argparse
import json
import os
import statistics
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText

from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.engines.base import Engine
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Completion, Request, SamplingParams

FAMILY = family_of("qwen3_vl")


def make_engine(
    args: argparse.Namespace, path: str, processor: Processor, longest: int, keep_kv: bool
) -> Engine:
    model = load_model(path, FAMILY, torch.float32)
    banned, pixels, rows = (
        processor.banned_ids(vocab_size(model)),
        PixelCache(processor.pixels),
        args.groups * args.samples,
    )
    if not args.sglang:
        places = {"image_tokens": processor.image_tokens}
        return TorchEngine(
            model, FAMILY, banned=banned, pixels=pixels, max_running=rows, keep_kv=keep_kv, **places
        )
    from rlinf_vl.engines.sglang.engine import SglangEngine
    from rlinf_vl.engines.sglang.settings import Settings

    sizes = {"context_length": longest, "max_running": rows, "dtype": torch.float32}
    return SglangEngine(
        Settings(model_path=path, keep_kv=keep_kv, **sizes),
        FAMILY,
        banned=banned,
        pixels=processor.pixels,
        image_tokens=processor.image_tokens,
    )


def generate(
    engine: Engine, requests: list[Request], weights: list[dict], every: float | None
) -> tuple[list, list]:
    """Answers, and the seconds of each update that came meanwhile: versions are counted on, set `version % 2` of the weights."""
    over, seconds = threading.Event(), []

    def update() -> None:
        while not over.wait(every):
            began = time.perf_counter()
            engine.load_weights([weights[(engine.version + 1) % 2]], engine.version + 1)
            seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=update)
    if every is not None:
        thread.start()
    done = engine.generate(requests)
    over.set()
    if every is not None:
        thread.join()
    return done, seconds


@torch.inference_mode()
def largest_difference(
    requests: list[Request], done: list[Completion], models: list, processor: Processor
) -> float:
    """Of the first sample of each request."""
    banned = torch.from_numpy(processor.banned_ids(vocab_size(models[0])))
    worst = 0.0
    for request, completion in zip(requests, done, strict=True):
        sample = completion.samples[0]
        row = torch.from_numpy(np.concatenate([request.ids, sample.ids]).astype(np.int64))[None]
        for parity, model in enumerate(models):
            model.model.rope_deltas = None
            logits = model(
                input_ids=row,
                pixel_values=torch.from_numpy(np.concatenate([processor.pixels(image) for image in request.images])),
                image_grid_thw=torch.from_numpy(request.image_grids.astype(np.int64)),
                mm_token_type_ids=(row == processor.image_token_id).int(),
            ).logits[0].float()  # fmt: skip
            logits[:, banned] = -torch.inf
            own = np.flatnonzero(sample.versions % 2 == parity)
            at = len(request.ids) + own
            expected = logits.log_softmax(-1)[at - 1, row[0, at]].numpy()
            difference = np.abs(expected - sample.logprobs[own]).max(initial=0.0)
            worst = float(np.maximum(worst, difference))  # NaN where one is NaN
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sglang", action="store_true", help="measure the SGLang engine, not the torch engine"
    )
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two updates")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--check", type=int, default=8, help="responses to compare with transformers"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = str(toy_checkpoint_path())
    processor = Processor(path, FAMILY)
    renderer, dataset = Renderer(processor), ProblemDataset(["toy"], "train")
    sampling = SamplingParams(max_new_tokens=args.new_tokens)
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
    models = [
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(0)
    for p in models[1].parameters():
        p.data += 0.05 * p.data.std(correction=0) * torch.randn(p.shape, generator=generator)
    weights = [
        {
            part: v
            for name, p in model.named_parameters()
            for part, v in FAMILY.engine_names(name, p.detach())
        }
        if args.sglang
        else {name: p.detach() for name, p in model.named_parameters()}
        for model in models
    ]
    longest = max(len(request.ids) for request in requests) + args.new_tokens
    figures: dict[str, float | str] = {
        "engine": "SGLang" if args.sglang else "torch",
        "every_seconds": args.every,
    }
    table = Table(title=f"{figures['engine']}: an update every {args.every:g} s")
    for column in (
        "way",
        "tokens/s (median)",
        "updates",
        "seconds of one (median)",
        "largest difference",
    ):
        table.add_column(column)
    for way in ("undisturbed", "recompute", "keep"):
        engine = make_engine(args, path, processor, longest, way == "keep")
        done: list[Completion] = []
        speeds, seconds, worst = [], [], 0.0
        for repeat in range(args.repeats + 1):  # the first is a warm-up
            began = time.perf_counter()
            done, updates = generate(
                engine, requests, weights, None if way == "undisturbed" else args.every
            )
            if repeat:
                tokens = sum(
                    len(sample.ids) for completion in done for sample in completion.samples
                )
                speeds.append(tokens / (time.perf_counter() - began))
                seconds += updates
        if way != "keep":  # of which no single version of the weights gives the logprobs
            worst = largest_difference(
                requests[: args.check], done[: args.check], models, processor
            )
            figures[f"{way}_largest_difference"] = worst
        engine.close()
        figures |= {
            f"{way}_tokens_per_second": statistics.median(speeds),
            f"{way}_updates": len(seconds),
        }
        one = statistics.median(seconds) if seconds else 0.0
        figures[f"{way}_update_seconds"] = one
        figures[f"{way}_ratio"] = statistics.median(speeds) / float(
            figures["undisturbed_tokens_per_second"]
        )
        told = "-" if way == "keep" else f"{worst:.1e}"
        table.add_row(
            way, f"{statistics.median(speeds):,.0f}", str(len(seconds)), f"{one:.3f}", told
        )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
