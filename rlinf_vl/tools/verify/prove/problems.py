"""Random groups of trajectories for a tiny member, with pictures and clips of odd sizes."""

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from rlinf_vl.data.clips import clip_ref
from rlinf_vl.tools.verify.prove.member import VOCABULARY, Member
from rlinf_vl.types import (
    Grid,
    Group,
    ImageRef,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)

#: Heights and widths of pictures, in sides of an image token: none is a whole number of tokens.
SIZES = [(2.1, 3.2), (1.0, 1.0), (4.8, 2.7), (1.2, 5.9)]
#: Frames, heights and widths of clips, in the same unit: with pairs of frames and without.
CLIP_SIZES = [(2, 2.1, 1.2), (5, 1.0, 3.1), (9, 1.3, 1.2)]
#: Seconds between the frames of a clip.
INTERVAL = 0.7


def random_request(
    member: Member,
    rng: np.random.Generator,
    sizes: Sequence[Sequence[float]],
    sampling: SamplingParams | None = None,
    seeds: Sequence[int] = (),
) -> Request:
    """Return a prompt of random text with pictures and clips between it.

    Args:
        sizes: height and width of each picture in sides of an image token, for a clip with its
            frames before them; a family without a vision tower gets none.
    """
    parts = [rng.integers(0, VOCABULARY, int(rng.integers(3, 7)))]
    images: list[ImageRef] = []
    grids: list[Grid] = []
    for size in sizes if member.images else ():
        if len(size) == 3:
            image, grid = _clip(member, rng, *size)
            parts += _clip_placeholders(member, rng, grid)
        else:
            image, grid = _picture(member, rng, size)
            parts.append(_marked(member, member.image_tokens.ids(grid)))
        images.append(image)
        grids.append(grid)
        parts.append(rng.integers(0, VOCABULARY, int(rng.integers(1, 4))))
    return Request(
        np.concatenate(parts).astype(np.int32),
        tuple(images),
        np.array(grids, np.int64).reshape(-1, 3),
        sampling or SamplingParams(),
        tuple(seeds),
    )


def random_group(
    member: Member,
    rng: np.random.Generator,
    sizes: Sequence[Sequence[float]],
    lengths: Sequence[int],
    name: str,
) -> Group:
    """Return a group of answers of these lengths to one random prompt."""
    request = random_request(member, rng, sizes)
    samples = []
    for n in lengths:
        ids = rng.integers(0, VOCABULARY, n).astype(np.int32)
        logprobs = (-3 + rng.normal(size=n)).astype(np.float32)
        samples.append(Sample(ids, logprobs, np.zeros(n, np.int32), "stop"))
    return answered(request, samples, name)


def answered(request: Request, samples: Sequence[Sample], name: str) -> Group:
    """Return the group of these samples of a request."""
    trajectories = []
    for i, sample in enumerate(samples):
        sequence = TokenSequence.of_sample(request, sample)
        reward = float(i % 2)
        turn = Turn(0, len(request.ids), len(sequence.ids), sample.finish_reason, reward)
        trajectories.append(Trajectory((sequence,), (turn,), reward, {}, sample.finish_reason))
    return Group(name, name, len(request.ids), tuple(trajectories))


def flat_groups(member: Member) -> list[Group]:
    """Return groups with one picture, with none, and with several."""
    rng = np.random.default_rng(0)
    return [
        random_group(member, rng, SIZES[:1], [5, 1, 9], "one picture"),
        random_group(member, rng, (), [4, 6], "text"),
        random_group(member, rng, SIZES[1:], [7, 3], "several pictures"),
    ]


def tree_groups(member: Member) -> list[Group]:
    """Return groups of trajectories with a second sequence, without half of the first answer."""
    rng = np.random.default_rng(1)
    groups = [
        random_group(member, rng, SIZES[:2], [8, 6], "two pictures"),
        random_group(member, rng, (), [6, 9], "text"),
    ]
    longer = []
    for group in groups:
        trajectories = tuple(_with_second_turn(t, rng) for t in group.trajectories)
        longer.append(replace(group, trajectories=trajectories))
    return longer


def clip_groups(member: Member) -> list[Group]:
    """Return groups with one clip, with clips between pictures, and with none."""
    rng = np.random.default_rng(3)
    return [
        random_group(member, rng, CLIP_SIZES[:1], [5, 2], "one clip"),
        random_group(member, rng, (SIZES[0], *CLIP_SIZES[1:], SIZES[1]), [7, 3], "between"),
        random_group(member, rng, (), [4], "text"),
    ]


def _with_second_turn(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Add a turn whose prompt has the first half of the answer before it, and an observation."""
    (first,), (turn,) = trajectory.sequences, trajectory.turns
    middle = (turn.start + turn.end) // 2
    observation, answer = (rng.integers(0, VOCABULARY, n).astype(np.int32) for n in (3, 5))
    ids = np.concatenate([first.ids[:middle], observation, answer])
    start = len(ids) - len(answer)
    sampled = np.arange(len(ids)) >= start
    second = replace(
        first,
        ids=ids,
        loss_mask=sampled,
        logprobs=np.where(sampled, -2, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
    )
    next_turn = replace(turn, sequence=1, start=start, end=len(ids))
    return replace(trajectory, sequences=(first, second), turns=(turn, next_turn))


def _picture(
    member: Member, rng: np.random.Generator, size: Sequence[float]
) -> tuple[ImageRef, Grid]:
    """Return a picture of noise, and its grid."""
    assert member.images is not None
    height, width = _sides(member, size)
    return ImageRef.of(_noise(rng, height, width)), member.images.grid(height, width)


def _clip(
    member: Member, rng: np.random.Generator, frames: float, *size: float
) -> tuple[ImageRef, Grid]:
    """Return a clip of so many frames of noise, and its grid."""
    assert member.videos is not None
    n, (height, width) = int(frames), _sides(member, size)
    pictures = [_noise(rng, height, width) for _ in range(n)]
    clip = clip_ref(pictures, [INTERVAL * i for i in range(n)])
    return clip, member.videos.grid(n, height, width)


def _sides(member: Member, size: Sequence[float]) -> tuple[int, int]:
    """Return the height and width in pixels of a size in sides of an image token."""
    height, width = (max(1, round(n * _token_side(member))) for n in size)
    return height, width


def _noise(rng: np.random.Generator, height: int, width: int) -> bytes:
    """Return a picture of noise as a PNG."""
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def _token_side(member: Member) -> int:
    """Return the side in pixels of an image token, or about it."""
    vision = member.config.vision_config.to_dict()
    if member.family.blank_tokens > 1:  # sides are resized anyway
        return 16
    return member.family.token_side(vision)


def _clip_placeholders(member: Member, rng: np.random.Generator, grid: Grid) -> list[np.ndarray]:
    """Return the ids of a clip: its runs of placeholders, with random text for the times."""
    parts: list[np.ndarray] = []
    for run in member.image_tokens.clip_ids(grid):
        parts += [rng.integers(0, VOCABULARY, int(rng.integers(2, 5))), _marked(member, run)]
    return parts


def _marked(member: Member, placeholders: np.ndarray) -> np.ndarray:
    """Return a run of placeholders between the ids of an image's start and end."""
    ids = placeholders.tolist()
    config = member.config
    for prefix in ("vision", "image"):  # the keys' names in Qwen's and in GLM's configs
        start = getattr(config, f"{prefix}_start_token_id", None)
        end = getattr(config, f"{prefix}_end_token_id", None)
        if start is not None and end is not None:
            ids = [start, *ids, end]
            break
    return np.array(ids)
