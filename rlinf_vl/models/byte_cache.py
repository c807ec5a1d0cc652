"""A cache of the results of a function, bounded by their bytes."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Argument = TypeVar("Argument")
Value = TypeVar("Value")


def same(argument: Hashable) -> Hashable:
    """Return the argument: the `key` for arguments that can be keys themselves."""
    return argument


def text_bytes(argument: object, value: object) -> int:
    """Return the bytes of argument and value: text, bytes, or a flat tuple of them or ints."""
    total = 0
    for item in (argument, value):
        total += sys.getsizeof(item)
        if isinstance(item, tuple):
            total += sum(map(sys.getsizeof, item))
    return total


class ByteCache(Generic[Argument, Value]):
    """A cache of a function's results, least recently used out first, bounded by their bytes.

    A bound of entries would not bound memory where one entry may be a thousand times as large as
    another. Any thread may call the cache. Threads that miss the same argument at the same time
    each compute it, and one result is kept. The newest result is kept even if it exceeds the bound
    alone.

    Args:
        compute: the function.
        key: argument → its key in the cache.
        size: (argument, value) → bytes of the entry.
        max_bytes: the bound.
    """

    def __init__(
        self,
        compute: Callable[[Argument], Value],
        *,
        size: Callable[[Argument, Value], int],
        max_bytes: int,
        key: Callable[[Argument], Hashable] = same,  # type: ignore[assignment]
    ) -> None:
        self.n_bytes = 0
        self._compute = compute
        self._key = key
        self._size = size
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, argument: Argument) -> Value:
        """Return `compute(argument)`, from the cache where it is there."""
        key = self._key(argument)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        # Outside the lock: other threads need not wait while one computes.
        value = self._compute(argument)
        n_bytes = self._size(argument, value)
        with self._lock:
            if key in self._entries:  # another thread computed it meanwhile
                return self._entries[key][0]
            self._entries[key] = value, n_bytes
            self.n_bytes += n_bytes
            while self.n_bytes > self._max_bytes and len(self._entries) > 1:
                _, (_, dropped_bytes) = self._entries.popitem(last=False)
                self.n_bytes -= dropped_bytes
        return value
