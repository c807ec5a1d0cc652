"""Images among token ids: how many placeholders an image takes, and the positions of all tokens.

Positions are computed for one sequence before packing. Most models count tokens. Those with M-RoPE
have a text token advance t, h and w together; an image's tokens are spread over its grid, and
advance what follows by the grid's longer side (Wang et al. 2024, "Qwen2-VL", section 2.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rlinf_vl.types import Grid, TokenSequence

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

    def expand(
        self, rendered: np.ndarray, image_ids: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Replace the one placeholder of each image by all ids of the image.

        Args:
            rendered: int32 [R], with as many placeholders as there are images.
            image_ids: the ids of each image, see `ImageProcessor.ids`.

        Returns:
            (ids int32 [T], lengths int64 [R]: the number of ids that each of `rendered` became).
        """
        placeholders = np.flatnonzero(rendered == self.id)
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
        placeholders = int((sequence.ids == self.id).sum())
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
    placeholders = np.flatnonzero(ids == image_tokens.id)
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

    Returns:
        int64 [4, T], rows (text, t, h, w). The text row counts tokens 0…T-1; packing restarts it
            per segment.

    Raises:
        ValueError: the placeholders in `ids` are not exactly those of `grids`.
    """
    placeholders, tokens_per_image = _placeholders(ids, grids, image_tokens)
    out = np.tile(np.arange(len(ids)), (4, 1))
    n_used = 0  # placeholders of earlier images
    token_grids = image_tokens.token_grids(grids).tolist()
    for (t, h, w), n in zip(token_grids, tokens_per_image.tolist(), strict=True):
        start, end = int(placeholders[n_used]), int(placeholders[n_used]) + n
        if placeholders[n_used + n - 1] != end - 1:
            raise ValueError(
                f"image placeholders at {start} are interrupted: {n} in a row are needed for "
                f"{(t, h, w)} tokens"
            )
        position = out[1, start]
        out[1:, start:end] = position + _grid_coordinates(t, h, w)
        # Later tokens were counted one by one: move them to just after the grid's longer side.
        out[1:, end:] += position + max(h, w) - out[1, end : end + 1]
        n_used += n
    return out


@lru_cache(128)
def _grid_coordinates(*grid: int) -> np.ndarray:
    """Return int64 [3, n]: the coordinates of each token of a grid (t, h, w)."""
    coordinates = np.indices(grid).reshape(3, -1)
    coordinates.setflags(write=False)  # the cache hands the same array to every caller
    return coordinates
