"""What the trainer benchmark trains: a Qwen3-VL of a given shape with random weights, and GRPO groups with geometry images.

Prompts are Geometry3K problems where the data is at hand (`--data`), otherwise drawn images and texts of like sizes; the
responses are random ids with lengths from a long-tailed distribution (log-normal, cut to 20 … 300).
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.extras.toy.files import (
    EOS_TOKEN,
    PAD_TOKEN,
    special_ids,
    write_toy_files,
)
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import (
    Group,
    ImageRef,
    Problem,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)

PATCH, MERGE = 16, 2
#: Image area: 200 … 400 tokens of 32 × 32 pixels, so that prompts have 150 … 500 ids.
MIN_PIXELS, MAX_PIXELS = 200 * 1024, 400 * 1024
SHAPES = {
    # Qwen3-VL-2B-Instruct's config.json
    "2b": (
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
        }
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        {
            "hidden_size": 1024,
            "depth": 24,
            "num_heads": 16,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
        }
        | {"deepstack_visual_indexes": [5, 11, 17]},
        [24, 20, 20],
    ),
    # 46 M parameters, with layers wide enough to be like a larger model's
    "small": (
        {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 4}
        | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64},
        {
            "hidden_size": 256,
            "depth": 6,
            "num_heads": 4,
            "intermediate_size": 1024,
            "out_hidden_size": 768,
        }
        | {"deepstack_visual_indexes": [1, 3]},
        [12, 10, 10],
    ),
    # for a look at the program, not at speeds
    "tiny": (
        {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        {
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
        }
        | {"deepstack_visual_indexes": [0]},
        [4, 2, 2],
    ),
}


def write_model(folder: Path, shape: str, dtype: torch.dtype = torch.float32) -> None:
    """Write a checkpoint folder in HF format: random weights, the toy's tokenizer, Qwen3-VL's image settings."""
    text, vision, sections = SHAPES[shape]
    ids = special_ids()
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config=text
        | {"rope_parameters": rope, "tie_word_embeddings": True, "max_position_embeddings": 32768}
        | {"eos_token_id": ids[EOS_TOKEN], "pad_token_id": ids[PAD_TOKEN]},
        vision_config=vision
        | {"patch_size": PATCH, "spatial_merge_size": MERGE, "num_position_embeddings": 2304},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    # 2 billion random numbers take a CPU a minute.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3VLForConditionalGeneration(config)
    model.to(dtype).save_pretrained(folder)
    write_toy_files(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text())
        settings |= {
            "patch_size": PATCH,
            "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        }
        (folder / name).write_text(json.dumps(settings, indent=1))


def geo3k_problems(parquet: Path, count: int, rng: np.random.Generator) -> list[Problem]:
    dataset = ProblemDataset([str(parquet)], "train")
    return [dataset[int(i)] for i in rng.permutation(len(dataset))[:count]]


def drawn_problems(count: int, rng: np.random.Generator) -> list[Problem]:
    """Random polygons and sentences, for where there is no data."""
    problems = []
    for i in range(count):
        width, height = (int(x) for x in rng.integers(200, 640, 2))
        picture = Image.new("RGB", (width, height), "white")
        corners = [(int(x) % width, int(y) % height) for x, y in rng.integers(0, 640, (4, 2))]
        ImageDraw.Draw(picture).polygon(corners, outline="black")
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        image = ImageRef.of(buffer.getvalue())
        text = "Find x in the figure " + "".join(
            chr(97 + c) for c in rng.integers(0, 26, rng.integers(40, 160))
        )
        parts = (
            {"type": "image_url", "image_url": {"url": image.url}},
            {"type": "text", "text": text},
        )
        problems.append(Problem(str(i), ({"role": "user", "content": list(parts)},), "1", (image,)))
    return problems


@dataclass(frozen=True)
class Workload:
    """`groups[i]` answers `problems[i]`; `lengths[i]` are its responses' lengths."""

    problems: list[Problem]
    groups: list[Group]

    @property
    def lengths(self) -> list[list[int]]:
        return [[t.n_response_tokens for t in g.trajectories] for g in self.groups]

    @property
    def response_tokens(self) -> int:
        return sum(map(sum, self.lengths))


def make_workload(
    problems: list[Problem],
    processor: Processor,
    banned: np.ndarray,
    samples: int,
    rng: np.random.Generator,
) -> Workload:
    """Groups of `samples` random responses each; prompts of other than 150 … 500 ids are left out."""
    allowed = np.flatnonzero(~banned)
    kept, groups, renderer = [], [], Renderer(processor)
    for problem in problems:
        prompt, grids = renderer.prompt(problem.messages, problem.images)
        if not 150 <= len(prompt) <= 500:
            continue
        kept.append(problem)
        request = Request(prompt, problem.images, grids, SamplingParams(), ())
        rewards = rng.permutation(np.arange(samples) % 2)
        lengths = np.clip(rng.lognormal(4.6, 0.6, samples), 20, 300).astype(int)
        trajectories = []
        for n, reward in zip(lengths, rewards, strict=True):
            logprobs = np.full(n, -np.log(len(allowed)), np.float32)
            sample = Sample(
                rng.choice(allowed, n).astype(np.int32), logprobs, np.zeros(n, np.int32), "stop"
            )
            turns = (Turn(0, len(prompt), len(prompt) + int(n), "stop", float(reward)),)
            sequences = (TokenSequence.of_sample(request, sample),)
            trajectories.append(Trajectory(sequences, turns, float(reward), {}, "stop"))
        groups.append(Group(problem.id, problem.id, len(prompt), tuple(trajectories)))
    return Workload(kept, groups)
