"""Images among token ids: how many placeholders an image takes, and the positions of all tokens.

Positions are those of M-RoPE, computed for one sequence before packing. A text token advances t, h
and w together. An image's tokens are spread over its grid, and advance what follows by the grid's
longer side (Wang et al. 2024, "Qwen2-VL", section 2.1).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlinf_vl.types import TokenSequence


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The placeholders of images among the token ids of one checkpoint.

    A grid is (t, h, w) in patches, as `ImageProcessor.grid` returns it.
    """

    id: int  # of a placeholder; -1, which no token has, where the model reads no images
    merge_size: int = 1  # patches that make one token, along h and along w

    def __call__(self, grids: np.ndarray) -> np.ndarray:
        """Return int [n], the number of placeholders of each image in `grids` [n, 3]."""
        return grids.prod(axis=1) // self.merge_size**2

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
    placeholders = np.flatnonzero(ids == image_tokens.id)
    tokens_per_image = image_tokens(grids)
    if len(placeholders) != tokens_per_image.sum():
        raise ValueError(
            f"{len(placeholders)} image placeholder ids for {len(grids)} images that need "
            f"{tokens_per_image.tolist()} of them"
        )
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
