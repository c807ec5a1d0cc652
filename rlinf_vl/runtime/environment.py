"""Variables of the environment that are set for a while."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that the block starts; then they are as before."""
    former = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(former)
