"""Images among token ids: how many placeholders an image takes, and the positions of all tokens.

A clip, the sampled frames of a video, is an image with placeholders of its own.

Positions are computed for one sequence before packing. Most models count tokens. Those with M-RoPE
have a text token advance t, h and w together; an image's tokens are spread over its grid, and what
follows begins one behind their largest position (Wang et al. 2024, "Qwen2-VL", section 2.1). Along t,
a clip's patches advance by one each or by their time; where their times are written between them,
each is a grid of its own. transformers 5 differs for clips that are longer than their grid's sides:
there the text begins behind the longer side, within the clip's time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlinf_vl.data.clips import is_clip, timestamps_of
from rlinf_vl.types import Grid, ImageRef, TokenSequence

#: Ends of the keys of a config that name token ids.
TOKEN_KEYS = ("token_id", "token_index")


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The placeholders of images among the token ids of one checkpoint.

    A grid is (t, h, w) in patches, as `ImageProcessor.grid` returns it; of an image that is cut
    into tiles, (tiles, 1, 1).
    """

    id: int  # of a placeholder; -1, which no token has, where the model reads no images
    merge_size: int = 1  # patches that make one token, along h and along w
    tokens_per_tile: int = 1
    #: Other ids of an image, around its placeholders or between them: they are never sampled.
    marks: tuple[int, ...] = ()
    #: What a chat template writes for an image, and the text with one placeholder that takes its
    #: place before a prompt is encoded; "" where the template writes the placeholder.
    template_text: str = ""
    placeholder_text: str = ""
    video_id: int = -1  # of a clip's placeholder; -1 where the model reads no clips
    timestamped: bool = (
        False  # whether the time of each temporal patch of a clip is written before it
    )
    frames_per_patch: int = 1  # frames of a clip that make one temporal patch
    #: Positions along t that a second of a clip takes; None where a temporal patch takes one.
    tokens_per_second: float | None = None
    #: Seconds of a temporal patch of each clip of the sequence at hand, see `with_times`.
    patch_seconds: tuple[float, ...] = ()

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The ids of placeholders."""
        return (self.id,) if self.video_id < 0 else (self.id, self.video_id)

    def placeholder_of(self, image: ImageRef) -> int:
        """Return the id of the placeholders of a picture or a clip."""
        return self.video_id if is_clip(image) else self.id

    def mask(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [T], True at the placeholders among ids [T]."""
        is_placeholder = ids == self.id
        return is_placeholder if self.video_id < 0 else is_placeholder | (ids == self.video_id)

    def with_times(self, images: Iterable[ImageRef]) -> "ImageTokens":
        """Return the placeholders of one sequence with these images.

        It has the times of the clips among them, if positions depend on times.
        """
        if self.tokens_per_second is None:
            return self
        times = [timestamps_of(image) for image in images if is_clip(image)]
        # Seconds between frames on average, as the rate at which they were sampled.
        seconds = tuple(self.frames_per_patch * (t[-1] - t[0]) / max(1, len(t) - 1) for t in times)
        return replace(self, patch_seconds=seconds)

    def runs(self, grid: Grid, placeholder_id: int) -> int:
        """Return the number of runs of placeholders of an image with these placeholders."""
        return grid[0] if self.timestamped and placeholder_id == self.video_id else 1

    def __call__(self, grids: np.ndarray) -> np.ndarray:
        """Return int [n], the number of placeholders of each image in `grids` [n, 3]."""
        return grids.prod(axis=1) * self.tokens_per_tile // self.merge_size**2

    def ids(self, grid: Grid) -> np.ndarray:
        """Return the placeholders of an image of this grid, int32 [n]."""
        return np.full(int(self(np.array([grid]))[0]), self.id, np.int32)

    def with_placeholders(self, rendered: str) -> str:
        """Return a rendered prompt with one placeholder for each image."""
        if not self.template_text:
            return rendered
        return rendered.replace(self.template_text, self.placeholder_text)

    def clip_ids(self, grid: Grid) -> list[np.ndarray]:
        """Return the placeholders of a clip of this grid, int32 [n] for each of its runs."""
        n, runs = int(self(np.array([grid]))[0]), self.runs(grid, self.video_id)
        return [np.full(n // runs, self.video_id, np.int32)] * runs

    def expand(
        self, rendered: np.ndarray, image_ids: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Replace each placeholder, one for a picture or a run of a clip, by all its ids.

        Args:
            rendered: int32 [R], with as many placeholders as there are `image_ids`.
            image_ids: the ids of each of them, see `Processor.image_ids`.

        Returns:
            (ids int32 [T], lengths int64 [R]: the number of ids that each of `rendered` became).
        """
        placeholders = np.flatnonzero(self.mask(rendered))
        lengths = np.ones(len(rendered), np.int64)
        pieces, position = [], 0
        for placeholder, ids in zip(placeholders.tolist(), image_ids, strict=True):
            pieces += [rendered[position:placeholder], ids]
            lengths[placeholder] = len(ids)
            position = placeholder + 1
        return np.concatenate([*pieces, rendered[position:]]), lengths

    def token_grids(self, grids: np.ndarray) -> np.ndarray:
        """Return the grids [n, 3] in tokens."""
        return grids // (1, self.merge_size, self.merge_size)

    def assert_placed(self, sequence: TokenSequence) -> None:
        """Assert that a sequence has as many placeholders as its images need."""
        placeholders = int(self.mask(sequence.ids).sum())
        grids = np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3)
        needed = int(self(grids).sum())
        assert placeholders == needed, (
            f"{placeholders} image placeholder ids for {len(grids)} images that need {needed}"
        )


def runs_of_images(is_placeholder: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the runs of image placeholders within segments.

    Args:
        is_placeholder: bool [T].
        bounds: int [S + 1], segment boundaries, 0 … T.

    Returns:
        int64 [n, 2]: the first placeholder of each run, and the token behind its last.
    """
    is_first = is_placeholder & ~np.append(False, is_placeholder[:-1])
    is_last = is_placeholder & ~np.append(is_placeholder[1:], False)
    inner = bounds[(bounds > 0) & (bounds < len(is_placeholder))]
    is_first[inner], is_last[inner - 1] = is_placeholder[inner], is_placeholder[inner - 1]
    return np.stack([np.flatnonzero(is_first), np.flatnonzero(is_last) + 1], axis=1)


def with_videos(image_tokens: ImageTokens, config: Any, timestamped: bool) -> ImageTokens:
    """Return the placeholders with those of clips, by a model's config.

    Args:
        timestamped: whether the prompt has the time of each temporal patch before it.
    """
    vision = config.vision_config
    return replace(
        image_tokens,
        video_id=config.video_token_id,
        timestamped=timestamped,
        frames_per_patch=vision.temporal_patch_size,
        tokens_per_second=getattr(vision, "tokens_per_second", None),
    )


def image_token_id(config: Any) -> int:
    """Return the id of an image's placeholders, whose key has two names in configs.

    Raises:
        ValueError: a config has neither.
    """
    for key in ("image_token_id", "image_token_index"):
        if getattr(config, key, None) is not None:
            return int(getattr(config, key))
    raise ValueError(f"the config of {config.model_type} names no image token")


def _placeholders(
    ids: np.ndarray, grids: np.ndarray, image_tokens: ImageTokens
) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices of the placeholders among `ids`, their number per image).

    Raises:
        ValueError: they are not as many as those of `grids`.
    """
    placeholders = np.flatnonzero(image_tokens.mask(ids))
    tokens_per_image = image_tokens(grids)
    if len(placeholders) != tokens_per_image.sum():
        raise ValueError(
            f"{len(placeholders)} image placeholder ids for {len(grids)} images that need "
            f"{tokens_per_image.tolist()} of them"
        )
    return placeholders, tokens_per_image


def counted_positions(ids: np.ndarray, grids: np.ndarray, image_tokens: ImageTokens) -> np.ndarray:
    """Return the positions of one unpacked sequence, int64 [4, T], of a model that counts tokens.

    Raises:
        ValueError: the placeholders in `ids` are not as many as those of `grids`.
    """
    _placeholders(ids, grids, image_tokens)
    return np.tile(np.arange(len(ids)), (4, 1))


def mrope_positions(ids: np.ndarray, grids: np.ndarray, image_tokens: ImageTokens) -> np.ndarray:
    """Return the positions of one unpacked sequence.

    Args:
        ids: int [T], image placeholders expanded.
        grids: int [n, 3], (t, h, w) in patches of each image, in order of appearance.
        image_tokens: with the times of clips, see `ImageTokens.with_times`.

    Returns:
        int64 [4, T], rows (text, t, h, w). The text row counts tokens 0…T-1; packing restarts it
            per segment.

    Raises:
        ValueError: the placeholders in `ids` are not exactly those of `grids`.
    """
    placeholders, _ = _placeholders(ids, grids, image_tokens)
    out = np.tile(np.arange(len(ids)), (4, 1))
    n_used = 0  # placeholders of earlier images
    for (t, h, w), time_step in _runs(ids[placeholders], grids, image_tokens):
        n = t * h * w
        start, end = int(placeholders[n_used]), int(placeholders[n_used]) + n
        if placeholders[n_used + n - 1] != end - 1:
            raise ValueError(
                f"image placeholders at {start} are interrupted: {n} in a row are needed for "
                f"{(t, h, w)} tokens"
            )
        position, steps = out[1, start], t
        out[1:, start:end] = position + _grid_coordinates(t, h, w)
        if time_step is not None:
            times = (np.arange(t, dtype=np.float32) * time_step).astype(np.int64)
            out[1, start:end] = position + np.repeat(times, h * w)
            steps = int(times[-1]) + 1
        # Later tokens were counted one by one: move them to just after the largest position.
        out[1:, end:] += position + max(steps, h, w) - out[1, end : end + 1]
        n_used += n
    return out


def _runs(
    placeholder_ids: np.ndarray, grids: np.ndarray, image_tokens: ImageTokens
) -> Iterator[tuple[Grid, np.float32 | None]]:
    """Yield for each run of placeholders its grid in tokens, and its step along t, None for one.

    `placeholder_ids` are those of all images, in order.
    """
    patch_seconds = iter(image_tokens.patch_seconds)
    n_used = 0
    for t, h, w in image_tokens.token_grids(grids).tolist():
        placeholder_id = placeholder_ids[n_used]
        n_used += t * h * w
        runs, step = image_tokens.runs((t, h, w), placeholder_id), None
        if placeholder_id == image_tokens.video_id and image_tokens.tokens_per_second is not None:
            # In float32, as in transformers: positions are rounded down.
            step = np.float32(image_tokens.tokens_per_second) * np.float32(next(patch_seconds))
        yield from [((t // runs, h, w), step)] * runs


@lru_cache(128)
def _grid_coordinates(*grid: int) -> np.ndarray:
    """Return int64 [3, n]: the coordinates of each token of a grid (t, h, w)."""
    coordinates = np.indices(grid).reshape(3, -1)
    coordinates.setflags(write=False)  # the cache hands the same array to every caller
    return coordinates
