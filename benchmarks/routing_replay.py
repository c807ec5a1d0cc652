"""A mixture of experts whose engine computes in bfloat16 and whose trainer in float32, with and without routing replay (R3).

    python benchmarks/routing_replay.py --seeds 1 2 3

The embedded engine answers the toy's validation questions with the checkpoint `toy-qwen3_vl_moe` of each seed. The same answers go
through the trainer's packed rows twice: its router chooses experts by itself, and takes those that the engine reports. Printed: the
share of tokens and layers in which the two would go to other experts, and how far their logprobs are apart.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.extras.toy.drawings import toy_rows
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.mixture import ExpertLoad
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Group, ImageRef, Request, SamplingParams, TokenSequence, Trajectory, Turn


def answered(path: str, problems: int, samples: int, dtype: torch.dtype) -> list[Group]:
    """What the engine answers in `dtype`, with the experts of each token."""
    family = family_of("auto", path)
    processor, model = Processor(path, family), load_model(path, family, dtype)
    renderer = Renderer(processor)
    engine = TorchEngine(
        model,
        family,
        banned=processor.banned_ids(vocab_size(model)),
        pixels=PixelCache(processor.pixels),
        image_tokens=processor.image_tokens,
        max_running=problems * samples,
        report_routes=True,
    )
    requests = []
    sampling = SamplingParams(max_new_tokens=24, stop_ids=processor.stop_ids)
    for number, row in enumerate(toy_rows("val")[:problems]):
        image = ImageRef.of(row["images"][0]["bytes"])
        parts = [{"type": "image_url", "image_url": {"url": image.url}}]
        parts.append({"type": "text", "text": row["problem"].removeprefix("<image>")})
        ids, grids = renderer.prompt([{"role": "user", "content": parts}], (image,))
        requests.append(
            Request(
                ids,
                (image,),
                grids,
                sampling,
                tuple(range(number * samples, (number + 1) * samples)),
            )
        )
    try:
        completions = engine.generate(requests)
    finally:
        engine.close()
    groups = []
    for number, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        trajectories = []
        for sample in completion.samples:
            sequence = TokenSequence.of_sample(request, sample)
            turn = Turn(0, len(request.ids), len(sequence.ids), sample.finish_reason, 0.0)
            trajectories.append(Trajectory((sequence,), (turn,), 0.0, {}, sample.finish_reason))
        groups.append(Group(str(number), str(number), len(request.ids), tuple(trajectories)))
    return groups


@torch.no_grad()
def compare(path: str, groups: list[Group], replay: bool) -> dict[str, float]:
    """The trainer in float32 against what the engine said of its tokens."""
    family = family_of("auto", path)
    processor, model = Processor(path, family), load_model(path, family, torch.float32)
    policy = PolicyModel(
        model, family, processor.banned_ids(vocab_size(model)), temperature=1.0, chunk=None
    )
    policy.replay = replay
    mixture = policy.mixture
    if mixture is None:
        raise SystemExit(f"{path}: its family, {family.model_type}, has no mixture of experts")
    load = ExpertLoad(len(mixture.layers), mixture.experts, "cpu")
    collate = Collator(family, processor.image_tokens, processor.pixels, processor.pad_id)
    found = []
    for group in groups:
        batch = collate(
            [Member(group, i, [0.0]) for i in range(len(group.trajectories))], run_vision=True
        )
        assert batch.rollout_logprobs is not None
        logprobs, _ = policy(batch, None, load)
        found.append(batch.rollout_logprobs - logprobs.numpy())
    difference = np.concatenate(found)
    _, reported, differing = load.tokens.tolist()
    return {
        "tokens": len(difference),
        "disagreement": float(load.differing) / (reported * len(mixture.layers)),
        "disagreement_tokens": differing / reported,
        "kl": float(difference.mean()),
        "k3": float((np.exp(-difference) - 1 + difference).mean()),
        "abs_diff_mean": float(np.abs(difference).mean()),
        "abs_diff_max": float(np.abs(difference).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the checkpoints"
    )
    parser.add_argument("--model", help="one checkpoint's folder, instead of the toy's")
    parser.add_argument("--problems", type=int, default=152)
    parser.add_argument("--samples", type=int, default=8, help="answers to a problem")
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16", help="of the engine"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    paths = {
        seed: args.model or str(toy_checkpoint_path("toy-qwen3_vl_moe", seed=seed))
        for seed in args.seeds
    }
    figures = {}
    for seed, path in paths.items():
        groups = answered(
            path,
            args.problems,
            args.samples,
            torch.bfloat16 if args.precision == "bf16" else torch.float32,
        )
        for name, replay in (("off", False), ("replay", True)):
            measured = compare(path, groups, replay)
            figures |= {f"{name}_{seed}_{key}": value for key, value in measured.items()}
            print(
                f"seed {seed}, replay {'on' if replay else 'off'}: "
                + ", ".join(f"{k} {v:.3g}" for k, v in measured.items())
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
