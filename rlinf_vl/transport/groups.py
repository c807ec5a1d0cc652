"""Groups in Ray's object store, on their way from a rollout worker to the actor ranks.

A group's arrays are one contiguous buffer. An image that several rows show is an object of its own, stored once and named by
every group that shows it; its bytes are read in place.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import ray
from ray.exceptions import ObjectLostError
from ray.experimental import get_local_object_locations

from rlinf_vl.types import Group, ImageRef

#: Bytes that an object of its own and a reference to it take, about: a smaller image travels inside its group.
REFERENCE_BYTES = 512


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An `ImageRef` whose encoded bytes are an object of their own."""

    hash: str
    reference: ray.ObjectRef

    @property
    def data(self) -> memoryview:
        """The bytes, read in place. Waits for one object; `fetch` gets those of many groups together."""
        return memoryview(ray.get(self.reference))


class GroupStore:
    """The worker's side: groups and images that it has stored and that nobody has released."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[ray.ObjectRef, set[str]]] = {}
        self._images: dict[str, ray.ObjectRef] = {}
        self._groups_of_image = Counter[str]()  # how many of the groups show it

    def put(self, group: Group, *, own_images: bool = False) -> tuple[ray.ObjectRef, int]:
        """Store a group, and those of its images that aren't stored yet; with `own_images` they travel inside.

        Returns a reference to it and the bytes that this took. The store pins it until `release`: Ray may free an object
        whose only reference travels inside a streamed result before the receiver has registered it.
        """
        self.release([group.id])  # one of the same name, which was sampled again
        new = []
        for image, _ in group.images:
            if not own_images and len(image.data) > REFERENCE_BYTES and image.hash not in self._images:
                new.append(ray.put(np.frombuffer(image.data, np.uint8)))
                self._images[image.hash] = new[-1]
        hashes = {image.hash for image, _ in group.images}
        stored = {name: StoredImage(name, self._images[name]) for name in hashes & self._images.keys()}
        reference = ray.put(group.with_images(stored))
        self._groups[group.id] = (reference, hashes)
        self._groups_of_image.update(hashes)
        sizes = get_local_object_locations([reference, *new])
        return reference, sum(size["object_size"] for size in sizes.values())

    def release(self, group_ids: Sequence[str] | None) -> None:
        """Drop these groups (None: all), and the images that no other group shows."""
        for group_id in list(self._groups) if group_ids is None else group_ids:
            _, hashes = self._groups.pop(group_id, (None, ()))
            for name in hashes:
                self._groups_of_image[name] -= 1
                if not self._groups_of_image[name]:
                    del self._groups_of_image[name]
                    self._images.pop(name, None)


def fetch_surviving(references: Mapping[int, ray.ObjectRef]) -> dict[int, Group]:
    """As `fetch`, without groups that were lost with the worker that made them."""
    try:
        return fetch(references)
    except ObjectLostError:
        groups: dict[int, Group] = {}
        for key, reference in references.items():
            with suppress(ObjectLostError):
                groups |= fetch({key: reference})
        return groups


def fetch(references: Mapping[int, ray.ObjectRef]) -> dict[int, Group]:
    """The groups by key, with their images: all groups in one call, then all images, each once.

    Images are read-only views of the object store, which keeps an object as long as a view of it lives.
    """
    groups = dict(zip(references, ray.get(list(references.values())), strict=True))
    stored = {i.hash: i for group in groups.values() for i, _ in group.images if isinstance(i, StoredImage)}
    data = ray.get([image.reference for image in stored.values()])
    images = {name: ImageRef(name, memoryview(array)) for name, array in zip(stored, data, strict=True)}
    return {key: group.with_images(images) for key, group in groups.items()}
