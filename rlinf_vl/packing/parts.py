"""Splitting of a packed row over the ranks that compute it together (`rlinf_vl.models.context`)."""

from dataclasses import replace

import numpy as np

from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.types import MicroBatch, RowPart


def row_part(batch: MicroBatch, rank: int, size: int, image_tokens: ImageTokens) -> MicroBatch:
    """Return the `rank`-th of `size` equal parts of a row without pixels.

    The part has the images of its own placeholder tokens only. A row whose length `size` does not
    divide is padded with a segment of filler first.
    """
    filler = -len(batch.ids) % size
    bounds, prefix, copies = batch.cu_seqlens, batch.prefix, batch.copies
    if filler:
        # Every rank adds the same filler segment, so that all of them agree on the segments.
        bounds = np.append(bounds, bounds[-1] + filler)
        prefix, copies = np.append(prefix, -1), np.append(copies, 0)
    part_length = int(bounds[-1]) // size
    tokens = slice(rank * part_length, (rank + 1) * part_length)

    def part_of(x: np.ndarray) -> np.ndarray:
        """Return the part's slice of a per-token array [T, …]."""
        return np.pad(x, [(0, filler), *[(0, 0)] * (x.ndim - 1)])[tokens]

    def indices_in_part(positions: np.ndarray) -> np.ndarray:
        """Return the indices of those row positions that lie in the part."""
        return np.flatnonzero((tokens.start <= positions) & (positions < tokens.stop))

    sampled, placeholders = indices_in_part(batch.predict), indices_in_part(batch.image_positions)
    feature_counts = image_tokens(batch.grids)
    image_of_feature = np.repeat(np.arange(len(feature_counts)), feature_counts)
    features = batch.image_features[placeholders]
    part_images = np.unique(image_of_feature[features])
    # Index of each feature among the features of the part's images alone.
    part_feature = np.cumsum(np.isin(image_of_feature, part_images)) - 1
    return replace(
        batch,
        ids=part_of(batch.ids),
        positions=part_of(batch.positions.T).T,
        cu_seqlens=bounds,
        prefix=prefix,
        copies=copies,
        row_columns={name: part_of(column) for name, column in batch.row_columns.items()},
        predict=batch.predict[sampled] - tokens.start,
        targets=batch.targets[sampled],
        images=tuple(batch.images[i] for i in part_images),
        grids=batch.grids[part_images],
        image_positions=batch.image_positions[placeholders] - tokens.start,
        image_features=part_feature[features],
        part=RowPart(tokens, sampled),
    )
