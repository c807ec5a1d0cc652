"""Conversations with pictures: episodes of several turns through the player, an image in every turn; prefixes kept by the engine
against each turn prefilled whole, in turn, in the same run.

    python benchmarks/multi_turn.py [--engine torch|sglang] [--groups 8] [--samples 8] [--turns 3] [--new-tokens 24]
                                    [--image 192] [--repeats 5] [--json FILE]

The environment is scripted: it shows another picture of `--image` × `--image` pixels after each answer. All episodes run at
once, each for all its turns and with answers of `--new-tokens` tokens, so every repetition and either way compute the same. Of
`--engine sglang` each request is given a cache key of its own to make it prefill whole.

`prefill_ratio` is tokens prefilled over tokens new: prompts once per group, then what each turn adds to its episode.
"""

import argparse
import asyncio
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table

from rlinf_vl.engines.base import Engine
from rlinf_vl.engines.sglang.engine import SglangEngine
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.envs import EnvMaker, StepResult
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.player import Player
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import RequestBuilder
from rlinf_vl.types import Group, Message, Problem, Request, SamplingParams


class Pictures:
    """Shows a picture that belongs to the episode and the turn, as PNG, and asks about it; pays nothing."""

    def __init__(self, size: int, turns: int, seed: int, group_seed: int) -> None:
        self.size, self.turns, self.seed, self.group_seed, self.step_number = (
            size,
            turns,
            seed,
            group_seed,
            0,
        )

    def start(self, problem: Problem) -> list[Message]:
        return [self._message(self.group_seed)]

    def step(self, response: str) -> StepResult:
        self.step_number += 1
        done = self.step_number == self.turns
        return StepResult(() if done else (self._message(self.seed),), 0.0, done)

    def close(self) -> None:
        pass

    def _message(self, seed: int) -> Message:
        rng = np.random.default_rng([seed, self.step_number])
        picture = np.full((self.size, self.size, 3), 255, np.uint8)
        for _ in range(4):
            (x, y), colour = rng.integers(0, self.size // 2, 2), rng.integers(0, 256, 3)
            picture[y : y + self.size // 3, x : x + self.size // 3] = colour
        png = io.BytesIO()
        Image.fromarray(picture).save(png, "PNG")
        return {
            "role": "user",
            "content": [{"type": "image", "image": png.getvalue()}, {"type": "text", "text": "?"}],
        }


class Prefilling:
    """An engine that is given nothing to find again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(self, requests: Sequence[Request]) -> list:
        if isinstance(self.engine, SglangEngine):
            self.engine.requests.updates += 1  # names the prefix cache
            self.engine.requests.towers += 1  # and this the images whose embeddings are kept
        return self.engine.submit([replace(request, sessions=()) for request in requests])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


async def play(player: Player, groups: int, samples: int, sampling: SamplingParams) -> list[Group]:
    """All episodes at once."""

    async def play_group(number: int) -> Group:
        problem, seeds = Problem(str(number), (), ""), range(1000 * number, 1000 * number + samples)
        group = await player.start_group(problem, seeds, sampling, group_seed=1000 * number)
        player.submit_first_requests([group])
        return await player.play_group(problem.id, group)

    return await asyncio.gather(*map(play_group, range(groups)))


def new_tokens(groups: list[Group]) -> int:
    """Tokens of prompts, once per group, and of what was shown later."""
    own = sum(int((~s.loss_mask).sum()) - g.prefix_length for g in groups for s in g.sequences)
    return own + sum(group.prefix_length for group in groups)


def make_engine(
    args: argparse.Namespace, path: str, processor: Processor, context_length: int
) -> Engine:
    family, rows = family_of("qwen3_vl"), args.groups * args.samples
    model = load_model(path, family, torch.float32)
    banned, pixels = processor.banned_ids(vocab_size(model)), PixelCache(processor.pixels)
    banned[list(processor.stop_ids)] = True  # SGLang would stop at them, asked or not
    if args.engine == "torch":
        return TorchEngine(
            model,
            family,
            banned=banned,
            pixels=pixels,
            image_tokens=processor.image_tokens,
            max_running=rows,
        )
    from rlinf_vl.engines.sglang.engine import SglangEngine
    from rlinf_vl.engines.sglang.settings import Settings

    settings = Settings(
        model_path=path,
        context_length=context_length,
        max_running=rows,
        dtype=torch.float32,
        device="cpu",
        cpu_threads=args.threads,
    )
    return SglangEngine(
        settings, family, banned=banned, pixels=pixels, image_tokens=processor.image_tokens
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("torch", "sglang"), default="torch")
    parser.add_argument("--model", default="toy", help="checkpoint folder in HF format, or `toy`")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument(
        "--samples", type=int, default=8, help="episodes of a group; they begin alike"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--image", type=int, default=192, help="pixels along a side")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = args.model
    if path == "toy":
        from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

        path = str(toy_checkpoint_path())
    processor = Processor(path, family_of("qwen3_vl"), max_pixels=2 * args.image**2)
    seq_length = args.turns * (args.image**2 // 256 + args.new_tokens + 40)
    engine = make_engine(args, path, processor, seq_length)
    sampling = SamplingParams(max_new_tokens=args.new_tokens)
    shown = {"size": args.image, "turns": args.turns}
    renderer = Renderer(processor)
    builder = RequestBuilder(renderer, seq_length, max_prompt_length=seq_length)
    make_env = EnvMaker("multi_turn:Pictures", shown, {}, lambda *_: False, 1.0, 0.0)
    players: dict[str, Player] = {}
    for name, client_engine in (("kept", engine), ("prefilled whole", Prefilling(engine))):
        client = GenerationClient(client_engine, renderer, alive_timeout_s=60.0)
        players[name] = Player(client, builder, make_env, EpisodeSettings())
    seconds: dict[str, list[float]] = {name: [] for name in players}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in players}
    ratio: dict[str, float] = {}
    ids: dict[str, list] = {}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for name, player in players.items():
            if isinstance(engine, SglangEngine):
                engine.requests.updates += 1  # nothing of an earlier run is found
                engine.requests.towers += 1
            before, start, cpu = engine.prefilled_tokens, time.perf_counter(), time.process_time()
            groups = asyncio.run(play(player, args.groups, args.samples, sampling))
            if repeat:
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu)
            if errors := {t.error for g in groups for t in g.trajectories if t.error}:
                raise SystemExit(f"episodes failed: {errors}")
            ratio[name] = (engine.prefilled_tokens - before) / new_tokens(groups)
            ids[name] = [s.ids.tolist() for g in groups for s in g.sequences]
    engine.close()

    kept, whole = (statistics.median(times) for times in seconds.values())
    speedups, cpu_speedups = (
        [b / a for a, b in zip(*measured.values(), strict=True)]
        for measured in (seconds, cpu_seconds)
    )
    sampled = args.groups * args.samples * args.turns * args.new_tokens
    image_tokens = int(
        processor.image_tokens(np.array([processor.image_processor.grid(args.image, args.image)]))[
            0
        ]
    )
    figures = {
        "engine": args.engine,
        "groups": args.groups,
        "samples": args.samples,
        "turns": args.turns,
        "tokens_per_answer": args.new_tokens,
        "tokens_per_image": image_tokens,
        "threads": args.threads,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prefill_ratio_kept": ratio["kept"],
        "prefill_ratio_whole": ratio["prefilled whole"],
        "seconds_kept": kept,
        "seconds_whole": whole,
        "speedup": statistics.median(speedups),
        "speedup_min": min(speedups),
        "speedup_cpu_seconds": statistics.median(cpu_speedups)
        if args.engine == "torch"
        else None,  # SGLang: other processes
        "ids_identical": ids["kept"] == ids["prefilled whole"]
        if args.engine == "torch"
        else None,  # SGLang draws anew
    }
    episodes = f"{args.groups * args.samples} episodes of {args.turns} turns, {image_tokens} tokens an image"
    table = Table(title=f"{args.engine} engine, {episodes}")
    for column in ("prefixes", "seconds (median)", "sampled tokens / s", "prefilled / new"):
        table.add_column(column)
    for name, median in zip(players, (kept, whole), strict=True):
        table.add_row(name, f"{median:.2f}", f"{sampled / median:,.0f}", f"{ratio[name]:.2f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
