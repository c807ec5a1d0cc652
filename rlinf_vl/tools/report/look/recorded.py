"""Recorded trajectories of a step, read back as the token sequences that they were."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vl.data.clips import clip_ref
from rlinf_vl.data.images import encode_png
from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.clip_files import frames_of
from rlinf_vl.types import Grid, ImageRef, TokenSequence, Trajectory, Turn

_COLUMNS = [
    "split",
    "group_id",
    "sample",
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_logprobs",
    "weight_versions",
    "images",
    "turns",
    "messages",
]


@dataclass(frozen=True)
class Recorded:
    """A recorded trajectory.

    Attributes:
        key: its split, group and number within the group.
        images: the images that it shows, in the order of the file.
        mask: bool [tokens after the prompt, of all sequences], True where sampled.
        rollout_logprobs: float32, of the same tokens; None where the engine returned none.
        version: of the weights that sampled the last token.
    """

    key: tuple[str, str, int]
    trajectory: Trajectory
    images: tuple[ImageRef, ...]
    mask: np.ndarray
    rollout_logprobs: np.ndarray | None
    version: int


def recorded_steps(run: Path) -> list[int]:
    """Return the steps with recorded trajectories, in order."""
    files = run.glob("trajectories/step_*.parquet")
    return sorted(int(file.stem.removeprefix("step_")) for file in files)


def read_recorded(
    run: Path, step: int, split: str, grid_of: Callable[[ImageRef], Grid]
) -> list[Recorded]:
    """Return the trajectories of a step and split ("all": of both) that show images.

    Raises:
        ConfigError: the file is of a version that did not record the prompts' ids.
    """
    file = run / f"trajectories/step_{step}.parquet"
    if "prompt_ids" not in pq.read_schema(file).names:
        raise ConfigError(
            f"{file}: it was recorded by a version that did not keep the prompts' token ids; record "
            "anew, by training or by rlinf-vl eval checkpoint=…"
        )
    images: dict[str, ImageRef] = {}
    recorded = []
    for row in pq.read_table(file, columns=_COLUMNS).to_pylist():
        if split not in (row["split"], "all") or not row["images"] or not any(row["response_mask"]):
            continue
        for path in row["images"]:
            if path not in images:
                images[path] = _image(run / path)
        recorded.append(_recorded(row, [images[path] for path in row["images"]], grid_of))
    return recorded


def _recorded(
    row: dict[str, Any], images: list[ImageRef], grid_of: Callable[[ImageRef], Grid]
) -> Recorded:
    prompt = np.array(row["prompt_ids"], np.int32)
    ids = np.array(row["response_ids"], np.int32)
    mask = np.array(row["response_mask"], bool)
    starts = json.loads(row["turns"])["sequences"]
    image_numbers = [_image_numbers(messages) for messages in json.loads(row["messages"])]
    sequences, turns = [], []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        all_ids = np.concatenate([prompt, ids[start:end]])
        loss_mask = np.concatenate([np.zeros(len(prompt), bool), mask[start:end]])
        pairs = tuple((images[k], grid_of(images[k])) for k in image_numbers[number])
        versions = np.zeros(len(all_ids), np.int32)
        sequences.append(TokenSequence(all_ids, loss_mask, None, versions, pairs))
        turns.append(Turn(number, len(prompt), len(all_ids), "stop", 0.0))
    trajectory = Trajectory(tuple(sequences), tuple(turns), 0.0, {}, "stop")
    logprobs = row["rollout_logprobs"]
    return Recorded(
        (row["split"], row["group_id"], row["sample"]),
        trajectory,
        tuple(images),
        mask,
        None if logprobs is None else np.array(logprobs, np.float32),
        int(np.array(row["weight_versions"])[mask][-1]),
    )


def _image_numbers(messages: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the images that messages show, in order."""
    return [part for m in messages for part in m["content"] if isinstance(part, int)]


def _image(path: Path) -> ImageRef:
    """Read an image, or the clip that an animated file has."""
    data = path.read_bytes()
    with Image.open(io.BytesIO(data)) as picture:
        frames = frames_of(picture)
    if not frames:
        return ImageRef.of(data)
    return clip_ref([encode_png(frame) for frame, _ in frames], [seconds for _, seconds in frames])
