"""Groups in Ray's object store, on their way from a rollout worker to the actor ranks.

A group's arrays are one contiguous buffer. An image that several rows show is an object of its own,
stored once and named by every group that shows it; its bytes are read in place.
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

#: Bytes that an object of its own and a reference to it take, about: a smaller image travels inside
#: its group.
REFERENCE_BYTES = 512


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An `ImageRef` whose encoded bytes are an object of their own."""

    hash: str
    reference: ray.ObjectRef

    @property
    def data(self) -> memoryview:
        """The bytes, read in place.

        It waits for one object; `fetch` gets those of many groups together.
        """
        return memoryview(ray.get(self.reference))


class GroupStore:
    """The groups and images that a worker has stored and that nobody has released."""

    def __init__(self) -> None:
        # By group id: the group, and the hashes of the images that it shows.
        self._groups: dict[str, tuple[ray.ObjectRef, set[str]]] = {}
        self._images: dict[str, ray.ObjectRef] = {}  # by hash
        # By hash: how many of the groups show the image. A release then looks at its group alone.
        self._groups_of_image = Counter[str]()

    def put(self, group: Group, *, own_images: bool = False) -> tuple[ray.ObjectRef, int]:
        """Store a group, and those of its images that aren't stored yet.

        With `own_images` the images travel inside the group.

        Returns:
            A reference to the group, and the bytes that storing it took.

        The store pins the group until `release`: Ray may free an object whose only reference
        travels inside a streamed result before the receiver has registered it.
        """
        self.release([group.id])  # a group of the same name, which was sampled again
        new_images = []
        for image, _ in group.images:
            if (
                not own_images
                and len(image.data) > REFERENCE_BYTES
                and image.hash not in self._images
            ):
                new_images.append(ray.put(np.frombuffer(image.data, np.uint8)))
                self._images[image.hash] = new_images[-1]
        hashes = {image.hash for image, _ in group.images}
        stored = {
            name: StoredImage(name, self._images[name]) for name in hashes & self._images.keys()
        }
        reference = ray.put(group.with_images(stored))
        self._groups[group.id] = (reference, hashes)
        self._groups_of_image.update(hashes)
        sizes = get_local_object_locations([reference, *new_images])
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
    """Return the groups by key, as `fetch` does, without those lost with their worker."""
    try:
        return fetch(references)
    except ObjectLostError:
        # The error does not name the lost group: fetch them one by one.
        groups: dict[int, Group] = {}
        for key, reference in references.items():
            with suppress(ObjectLostError):
                groups |= fetch({key: reference})
        return groups


def fetch(references: Mapping[int, ray.ObjectRef]) -> dict[int, Group]:
    """Return the groups by key, with their images.

    One call gets all groups, a second one all images, each once. Images are read-only views of the
    object store, which keeps an object as long as a view of it lives.
    """
    groups = dict(zip(references, ray.get(list(references.values())), strict=True))
    stored = {
        i.hash: i
        for group in groups.values()
        for i, _ in group.images
        if isinstance(i, StoredImage)
    }
    data = ray.get([image.reference for image in stored.values()])
    images = {
        name: ImageRef(name, memoryview(array)) for name, array in zip(stored, data, strict=True)
    }
    return {key: group.with_images(images) for key, group in groups.items()}
