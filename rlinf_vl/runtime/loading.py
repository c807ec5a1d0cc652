"""Garbage collection in a process that loads torch and transformers: off meanwhile, and without
their objects afterwards."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection.

    torch and transformers make half a million objects that stay; scanning them again and again
    takes a sixth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_loaded() -> None:
    """Exclude all present objects from garbage collection; call it once an actor has loaded
    everything.

    Half a million objects of torch and transformers would hold up every thread for 0.2 s at each
    collection.
    """
    gc.collect()
    gc.freeze()
