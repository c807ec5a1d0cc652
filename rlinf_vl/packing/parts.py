"""The part of a packed row that one of the ranks which share it computes (`rlinf_vl.models.context`)."""

from dataclasses import replace

import numpy as np

from rlinf_vl.types import MicroBatch, RowPart


def row_part(batch: MicroBatch, rank: int, size: int, merge_size: int) -> MicroBatch:
    """The `rank`-th part of a row without pixels, of `size` equal ones; with the images that it has tokens of, and no others. A row
    that can't be divided equally gets a segment of filler."""
    missing = -len(batch.ids) % size
    bounds, prefix, copies = batch.cu_seqlens, batch.prefix, batch.copies
    if missing:
        bounds = np.append(bounds, bounds[-1] + missing)
        prefix, copies = np.append(prefix, -1), np.append(copies, 0)
    own = int(bounds[-1]) // size
    tokens = slice(rank * own, (rank + 1) * own)

    def local(x: np.ndarray) -> np.ndarray:
        """Of [T, …]."""
        return np.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])[tokens]

    def within(places: np.ndarray) -> np.ndarray:
        return np.flatnonzero((tokens.start <= places) & (places < tokens.stop))

    sampled, shown = within(batch.predict), within(batch.image_positions)
    counts = batch.grids.prod(axis=1) // merge_size**2  # features of each image
    image_of = np.repeat(np.arange(len(counts)), counts)
    features = batch.image_features[shown]
    kept = np.unique(image_of[features])
    number = np.cumsum(np.isin(image_of, kept)) - 1  # of each feature among those of kept images
    return replace(
        batch,
        ids=local(batch.ids),
        positions=local(batch.positions.T).T,
        cu_seqlens=bounds,
        prefix=prefix,
        copies=copies,
        routes=None if batch.routes is None else local(batch.routes),
        predict=batch.predict[sampled] - tokens.start,
        targets=batch.targets[sampled],
        images=tuple(batch.images[i] for i in kept),
        grids=batch.grids[kept],
        image_positions=batch.image_positions[shown] - tokens.start,
        image_features=number[features],
        part=RowPart(tokens, sampled),
    )
