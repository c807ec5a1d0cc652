"""M-RoPE positions of one sequence, computed before packing: a text token moves t, h and w together; an image's tokens
spread over its grid and push what follows by the grid's longer side (Wang et al. 2024, "Qwen2-VL", section 2.1)."""

import numpy as np


def mrope_positions(ids: np.ndarray, image_token_id: int, grids: np.ndarray, merge_size: int) -> np.ndarray:
    """Positions of one unpacked sequence.

    Args:
        ids: int [T], image placeholders expanded.
        image_token_id: id of the placeholder.
        grids: int [n, 3], (t, h, w) in patches of each image, in order of appearance.
        merge_size: patches per token along h and w.

    Returns:
        int64 [4, T], rows (text, t, h, w). The text row counts tokens 0…T-1; it is what packing restarts per segment.

    Raises:
        ValueError: the placeholders in `ids` are not exactly those of `grids` (t·h·w / merge_size² for each image).
    """
    is_image = ids == image_token_id
    tokens = grids[:, 0] * grids[:, 1] * grids[:, 2] // merge_size**2
    if int(is_image.sum()) != int(tokens.sum()):
        raise ValueError(
            f"{int(is_image.sum())} image placeholder ids for {len(grids)} images that need {tokens.tolist()} of them"
        )
    out = np.empty((4, len(ids)), np.int64)
    out[0] = np.arange(len(ids))
    cursor, position = 0, 0  # token index, next M-RoPE position
    starts = np.flatnonzero(is_image)
    offset = 0
    for (t, h, w), n in zip(grids.tolist(), tokens.tolist(), strict=True):
        start = int(starts[offset])
        if not is_image[start : start + n].all():
            raise ValueError(
                f"image placeholders at {start} are interrupted: {n} in a row are needed for grid {(t, h, w)}"
            )
        text = start - cursor
        out[1:, cursor:start] = position + np.arange(text)
        position += text
        grid = np.indices((t, h // merge_size, w // merge_size)).reshape(3, -1)
        out[1:, start : start + n] = position + grid
        position += max(h, w) // merge_size
        cursor, offset = start + n, offset + n
    out[1:, cursor:] = position + np.arange(len(ids) - cursor)
    return out
