"""What a worker stores of its groups: images that several show, and what it costs to let go of them. No Ray."""

import itertools
import time
from types import SimpleNamespace

import pytest

from rlinf_vl.transport import groups
from rlinf_vl.transport.groups import GroupStore
from rlinf_vl.types import ImageRef


@pytest.fixture(autouse=True)
def _references(monkeypatch):
    """Objects are numbers."""
    numbers = itertools.count()
    monkeypatch.setattr(groups.ray, "put", lambda value: next(numbers))
    monkeypatch.setattr(
        groups,
        "get_local_object_locations",
        lambda objects: {o: {"object_size": 10} for o in objects},
    )


def group(name, *image_names):
    images = [(ImageRef(image_name, bytes(1000)), (1, 2, 2)) for image_name in image_names]
    return SimpleNamespace(id=name, images=images, with_images=lambda stored: None)


def test_an_image_is_stored_until_the_last_group_that_shows_it_is_released():
    store = GroupStore()
    store.put(group("a", "one", "two"))
    store.put(group("b", "two", "two", "three"))
    assert store._images.keys() == {"one", "two", "three"}
    store.release(["a", "no such group"])
    assert store._images.keys() == {"two", "three"}
    store.put(group("c", "four"))
    store.put(group("c", "two"))  # sampled again
    store.release(["b"])
    store.release(["b"])
    assert store._images.keys() == {"two"} and store._groups.keys() == {"c"}
    store.release(None)
    assert not (store._images or store._groups or store._groups_of_image)


def test_an_image_is_stored_once_and_counted_with_the_first_group_that_shows_it():
    store = GroupStore()
    _, nbytes = store.put(group("a", "one", "two"))
    assert nbytes == 30, "the group and two images, 10 bytes each"
    _, nbytes = store.put(group("b", "two", "two", "three"))
    assert nbytes == 20, "the group and the image that is new"


def release_seconds(n):
    store = GroupStore()
    for k in range(n):
        store.put(group(f"g{k}", f"i{k}"))
    begun = time.thread_time()
    for k in range(n):
        store.release([f"g{k}"])
    return time.thread_time() - begun


def test_releasing_groups_one_by_one_costs_no_more_for_each_where_there_are_many():
    """Eight times as many groups take eight times as long, and not 64 times."""
    few = min(release_seconds(500) for _ in range(5))
    many = min(release_seconds(4000) for _ in range(3))
    assert many < 24 * few
