"""Many environments at once, some of which crash, hang or send broken pictures: how long the step takes, and who is harmed.

    python benchmarks/environments.py

Groups of three-turn episodes on the embedded engine with the toy's model. Of the episodes a share (--faulty, of each kind)
crashes, as many hang, and as many send a picture that can't be decoded: at the start, or in a later turn. Printed: seconds, the
errors by kind, whether every other episode ended well, and the share of the time in which the engine had work.
"""

import argparse
import asyncio
import io
import json
import logging
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.envs import EnvMaker, StepResult
from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.player import Player
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import RequestBuilder
from rlinf_vl.types import Group, Message, Problem, SamplingParams

FAULTS = ("crash", "hang", "picture")
TURNS = 3


class Faulty:
    """Shows a picture every turn. Episode number `seed` of each 1 / `share` has one of `FAULTS`, or none."""

    def __init__(self, *, seed: int, share: float) -> None:
        every = round(1 / share) if share else 0
        number = seed % every if every else len(FAULTS)
        self.fault = FAULTS[number] if number < len(FAULTS) else None
        self.when = seed // every % TURNS if every else 0
        self.turn = 0
        self.rng = np.random.default_rng(seed)

    def start(self, problem: Problem) -> list[Message]:
        fault = self.fault if self.turn == self.when else None
        if fault == "crash":
            raise RuntimeError("crashed")
        if fault == "hang":
            time.sleep(1e6)
        buffer = io.BytesIO()
        Image.fromarray(self.rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(buffer, "PNG")
        picture = buffer.getvalue()[: -2000 if fault == "picture" else None]
        return [
            {
                "role": "user",
                "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}],
            }
        ]

    def step(self, response: str) -> StepResult:
        self.turn += 1
        return StepResult(
            self.start(Problem("", (), "")) if self.turn < TURNS else (), 1.0, self.turn == TURNS
        )

    def close(self) -> None:
        pass


async def play(player: Player, groups: int, samples: int, sampling: SamplingParams) -> list[Group]:
    async def play_group(number: int) -> Group:
        seeds = range(number * samples, (number + 1) * samples)
        group = await player.start_group(Problem(str(number), (), ""), seeds, sampling)
        player.submit_first_requests([group])
        return await player.play_group(str(number), group)

    return await asyncio.gather(*map(play_group, range(groups)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="episodes of a group")
    parser.add_argument(
        "--faulty", type=float, default=0.05, help="share of the episodes, for each kind of fault"
    )
    parser.add_argument(
        "--turn-timeout", type=float, default=10.0, help="seconds that a call may take"
    )
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rlinf_vl").setLevel(logging.ERROR)
    family, path = family_of("qwen3_vl"), str(toy_checkpoint_path())
    processor, model = Processor(path, family), load_model(path, family, torch.float32)
    engine = TorchEngine(
        model,
        family,
        banned=processor.banned_ids(vocab_size(model)),
        pixels=PixelCache(processor.pixels),
        image_tokens=processor.image_tokens,
        max_running=args.groups * args.samples,
    )
    renderer = Renderer(processor)
    player = Player(
        GenerationClient(engine, renderer, alive_timeout_s=60.0),
        RequestBuilder(renderer, seq_length=1024, max_prompt_length=512),
        EnvMaker("environments:Faulty", {"share": args.faulty}, {}, lambda *_: False, 1.0, 0.0),
        EpisodeSettings(turn_timeout_s=args.turn_timeout),
    )
    start = time.perf_counter()
    groups = asyncio.run(
        play(player, args.groups, args.samples, SamplingParams(max_new_tokens=args.new_tokens))
    )
    seconds = time.perf_counter() - start
    engine.close()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    faults = [Faulty(seed=seed, share=args.faulty).fault for seed in range(len(trajectories))]
    errors = Counter(fault for fault, t in zip(faults, trajectories, strict=True) if t.error)
    figures = {
        "episodes": len(trajectories),
        "turn_timeout": args.turn_timeout,
        "seconds": seconds,
        "seconds_over_timeout": seconds - args.turn_timeout,
        **{f"errors_{fault}": errors[fault] for fault in FAULTS},
        "harmed": errors[None],
        "ended_well": sum(len(t.turns) == TURNS for t in trajectories if t.error is None),
        "engine_busy": player.client.busy.seconds() / seconds,
    }
    for name, value in figures.items():
        print(f"{name:22} {value:g}")
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
