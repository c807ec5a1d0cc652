"""The order in which tasks are dispatched: those whose rows share an image one after the other, so
that mostly one worker stores the image."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rlinf_vl.rollout.submission import Task


class ImageOrder:
    """The images that rows share, as far as rows were checked."""

    def __init__(self) -> None:
        #: (split, row) → number of an image that other rows have, too; None if there is none.
        self._shared: dict[tuple[str, int], int | None] = {}

    def add_rows(self, split: str, images_of_rows: Mapping[int, Collection[int]]) -> None:
        """Note the images of a split's rows, by row: equal images have equal numbers."""
        n_rows = Counter(image for images in images_of_rows.values() for image in images)
        for row, images in images_of_rows.items():
            shared_images = [image for image in images if n_rows[image] > 1]
            self._shared[split, row] = min(shared_images, default=None)

    def sorted(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks in order, each with its `own_images`."""
        by_image: dict[int | str, list[Task]] = {}
        for task in tasks:
            # A row that was never checked counts as one that shares an image with no other row, but
            # perhaps it does: `own_images` stays False.
            image = self._shared.get((task.split, task.row), task.group_id)
            key = task.group_id if image is None else image
            by_image.setdefault(key, []).append(replace(task, own_images=image is None))
        return list(itertools.chain.from_iterable(by_image.values()))
