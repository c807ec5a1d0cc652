"""The config and the rows of a smoke run: a config's own, small enough for minutes."""

import copy
import io
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.algorithm import DynamicSamplingConfig, OverlongConfig
from rlinf_vl.config.schema.data import DataConfig
from rlinf_vl.config.schema.guidance import DistillationConfig, ImageCorruptionConfig
from rlinf_vl.config.schema.reward import RewardConfig
from rlinf_vl.config.schema.rollout import AgentConfig, ThinkingConfig
from rlinf_vl.config.schema.runner import LoggerConfig, ProfileConfig, TrajectoriesConfig
from rlinf_vl.extras.toy.drawings import QUESTIONS, all_placements, draw
from rlinf_vl.tools.check.smoke.checkpoint import RandomCheckpoint

#: The reward function: a module without imports, as processes that score import it.
REWARD = "rlinf_vl.tools.check.smoke.reward:spread"
#: Steps that the smoke run trains at most: one, and one more that a checkpoint takes back.
STEPS = 2
#: Tokens along a side of a picture: of the toy's own size, and where prompts have room for more.
SMALL_SIDE, LARGE_SIDE = 3, 14
#: Most tokens of a response, on CPUs and on GPUs.
RESPONSE_TOKENS = {"cpu": 16, "cuda": 64}
#: How far the step moves a weight, as a share of the weights' own size: far enough to show in the
#: logprobs of a bfloat16 engine. Adapters begin at 0, so they take longer strides.
STRIDE, ADAPTER_STRIDE = 0.02, 0.2


def smoke_config(config: Config, checkpoint: RandomCheckpoint, folder: Path, device: str) -> Config:
    """Return the config of the smoke run, whose files lie in `folder`.

    Placement, engine, model, loss, precision and memory stay. Data, reward, environment and
    validation are the smoke run's own.
    """
    config = copy.deepcopy(config)
    runner, algorithm, rollout, actor = (
        config.runner,
        config.algorithm,
        config.rollout,
        config.actor,
    )
    rollout.model.model_path = str(checkpoint.folder)
    rollout.env_class, rollout.env_kwargs, rollout.max_turns = "single_turn", {}, None
    rollout.agent, rollout.thinking, rollout.chat_template_kwargs = (
        AgentConfig(),
        ThinkingConfig(),
        {},
    )
    rollout.return_logprobs = True
    algorithm.dynamic_sampling, algorithm.overlong = DynamicSamplingConfig(), OverlongConfig()
    algorithm.distillation = DistillationConfig()
    algorithm.image_corruption = ImageCorruptionConfig()
    algorithm.n_minibatches = 1
    longest = RESPONSE_TOKENS[device]
    sampling = algorithm.sampling_params
    sampling.max_new_tokens = min(sampling.max_new_tokens or longest, longest)
    runner.output_dir, runner.experiment_name = str(folder.parent), folder.name
    runner.schedule, runner.weight_sync_interval, runner.mismatch_check_interval = "sync", 1, 1
    runner.max_steps, runner.max_epochs, runner.val_check_interval = STEPS, 1, -1
    runner.resume_dir, runner.keep_last, runner.keep_best = None, 1, 0
    runner.trajectories = TrajectoriesConfig(max_gb=0)
    runner.logger, runner.profile = LoggerConfig(logger_backends=[]), ProfileConfig()
    # What a store keeps could not be taken away again by everybody who may write to it.
    if "://" in (runner.checkpoint_dir or ""):
        runner.checkpoint_dir = None
    actor.optim.lr_warmup_steps, actor.optim.lr_scheduler = 0, "constant"
    stride = ADAPTER_STRIDE if actor.model.is_lora else STRIDE
    actor.optim.lr = stride * checkpoint.width**-0.5
    actor.optim.vision_tower_lr = None
    config.reward = RewardConfig(functions=[{"function": REWARD}])
    data = config.data
    prompt_tokens = data.max_prompt_length
    side = LARGE_SIDE if prompt_tokens >= 4 * LARGE_SIDE**2 and device == "cuda" else SMALL_SIDE
    config.data = DataConfig(
        train_data_paths=[str(folder / "rows.parquet")],
        image_keys=["images"] if checkpoint.token_side else [],
        max_prompt_length=prompt_tokens,
        image_min_pixels=data.image_min_pixels,
        image_max_pixels=data.image_max_pixels,
        rollout_batch_size=_groups(config, side**2, device),
        shuffle=False,
        seed=data.seed,
    )
    n_rows = STEPS * config.data.rollout_batch_size
    write_rows(folder / "rows.parquet", n_rows, side * checkpoint.token_side)
    return config


def _groups(config: Config, image_tokens: int, device: str) -> int:
    """Return the groups of a step: on GPUs as many as fill a micro-batch of each rank."""
    limit = config.data.rollout_batch_size
    if device == "cpu":
        return min(limit, 8)
    group_tokens = image_tokens + config.algorithm.group_size * RESPONSE_TOKENS[device]
    # The number of ranks is not known before Ray has looked; a rank for each of 8 GPUs is usual.
    return min(limit, max(8, math.ceil(8 * config.runner.max_tokens_per_mbs / group_tokens)))


def write_rows(path: Path, n: int, side: int) -> None:
    """Write `n` questions on the toy's pictures, `side` pixels wide; 0: on none.

    In turn they have one picture, two and none, as engines fail on each of them apart.
    """
    rng, placements = np.random.default_rng(0), all_placements()
    rows = []
    for number in range(n):
        images = []
        for _ in range((1, 2, 0)[number % 3] if side else 0):
            png = io.BytesIO()
            picture = Image.fromarray(draw(placements[rng.integers(len(placements))], rng))
            picture.resize((side, side), Image.Resampling.NEAREST).save(png, format="PNG")
            images.append({"bytes": png.getvalue(), "path": None})
        question = tuple(QUESTIONS.values())[number % len(QUESTIONS)]
        problem = "<image>" * len(images) + f"{question} ({number})"
        rows.append({"problem": problem, "images": images, "answer": "1"})
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"problem": pa.string(), "images": pa.list_(image), "answer": pa.string()})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
