"""M-RoPE positions of one sequence, computed before packing: a text token moves t, h and w together; an image's tokens
spread over its grid and push what follows by the grid's longer side (Wang et al. 2024, "Qwen2-VL", section 2.1)."""

from functools import lru_cache

import numpy as np


def mrope_positions(ids: np.ndarray, image_token_id: int, grids: np.ndarray, merge_size: int) -> np.ndarray:
    """Positions of one unpacked sequence.

    Args:
        ids: int [T], image placeholders expanded.
        grids: int [n, 3], (t, h, w) in patches of each image, in order of appearance.
        merge_size: patches per token along h and w.

    Returns:
        int64 [4, T], rows (text, t, h, w). The text row counts tokens 0…T-1; packing restarts it per segment.

    Raises:
        ValueError: the placeholders in `ids` are not exactly those of `grids` (t·h·w / merge_size² for each image).
    """
    where = np.flatnonzero(ids == image_token_id)
    tokens = grids.prod(axis=1) // merge_size**2
    if len(where) != tokens.sum():
        raise ValueError(
            f"{len(where)} image placeholder ids for {len(grids)} images that need {tokens.tolist()} of them"
        )
    out = np.tile(np.arange(len(ids)), (4, 1))
    used = 0  # placeholders of the images before
    for (t, h, w), n in zip(grids.tolist(), tokens.tolist(), strict=True):
        start, end = int(where[used]), int(where[used]) + n
        if where[used + n - 1] != end - 1:
            raise ValueError(
                f"image placeholders at {start} are interrupted: {n} in a row are needed for grid {(t, h, w)}"
            )
        position = out[1, start]
        out[1:, start:end] = position + _within(t, h // merge_size, w // merge_size)
        out[1:, end:] += position + max(h, w) // merge_size - out[1, end : end + 1]
        used += n
    return out


@lru_cache(128)
def _within(*grid: int) -> np.ndarray:
    """int64 [3, n]: where each token of a grid (t, h, w) stands in it."""
    places = np.indices(grid).reshape(3, -1)
    places.setflags(write=False)
    return places
