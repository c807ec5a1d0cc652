"""M-RoPE positions of one sequence, computed before packing.

A text token advances t, h and w together. An image's tokens are spread over its grid, and advance
what follows by the grid's longer side (Wang et al. 2024, "Qwen2-VL", section 2.1).
"""

from functools import lru_cache

import numpy as np


def mrope_positions(
    ids: np.ndarray, image_token_id: int, grids: np.ndarray, merge_size: int
) -> np.ndarray:
    """Return the positions of one unpacked sequence.

    Args:
        ids: int [T], image placeholders expanded.
        image_token_id: the id of a placeholder.
        grids: int [n, 3], (t, h, w) in patches of each image, in order of appearance.
        merge_size: patches per token along h and w.

    Returns:
        int64 [4, T], rows (text, t, h, w). The text row counts tokens 0…T-1; packing restarts it
            per segment.

    Raises:
        ValueError: the placeholders in `ids` are not exactly those of `grids` (t·h·w / merge_size²
            for each image).
    """
    placeholders = np.flatnonzero(ids == image_token_id)
    tokens_per_image = grids.prod(axis=1) // merge_size**2
    if len(placeholders) != tokens_per_image.sum():
        raise ValueError(
            f"{len(placeholders)} image placeholder ids for {len(grids)} images that need "
            f"{tokens_per_image.tolist()} of them"
        )
    out = np.tile(np.arange(len(ids)), (4, 1))
    n_used = 0  # placeholders of earlier images
    for (t, h, w), n in zip(grids.tolist(), tokens_per_image.tolist(), strict=True):
        start, end = int(placeholders[n_used]), int(placeholders[n_used]) + n
        if placeholders[n_used + n - 1] != end - 1:
            raise ValueError(
                f"image placeholders at {start} are interrupted: {n} in a row are needed for grid "
                f"{(t, h, w)}"
            )
        position = out[1, start]
        out[1:, start:end] = position + _grid_coordinates(t, h // merge_size, w // merge_size)
        # Later tokens were counted one by one: move them to just after the grid's longer side.
        out[1:, end:] += position + max(h, w) // merge_size - out[1, end : end + 1]
        n_used += n
    return out


@lru_cache(128)
def _grid_coordinates(*grid: int) -> np.ndarray:
    """Return int64 [3, n]: the coordinates of each token of a grid (t, h, w)."""
    coordinates = np.indices(grid).reshape(3, -1)
    coordinates.setflags(write=False)  # the cache hands the same array to every caller
    return coordinates
