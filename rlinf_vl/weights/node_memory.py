"""Memory that processes of one node share.

It is anonymous and opened through /proc, so that no crash leaves it behind.
"""

import os

import torch


class NodeMemory:
    """Memory that other processes of this node map; it is freed with the last of them."""

    def __init__(self, path: str | None = None, size: int = 0) -> None:
        """Map the memory at `path`, which another process made.

        Without a path, make `size` bytes.
        """
        descriptor = (
            os.memfd_create("rlinf_vl-weights") if path is None else os.open(path, os.O_RDWR)
        )
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        if path is None:
            self._file.truncate(size)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        """The path that opens this memory in other processes."""
        nbytes = os.fstat(descriptor).st_size
        self.flat = torch.from_file(self.path, shared=True, size=nbytes, dtype=torch.uint8)

    def number_at(self, offset: int) -> int:
        """Return the number at this offset.

        A reader sees it no sooner than what was written before it: system calls read and write it.
        """
        return int.from_bytes(os.pread(self._file.fileno(), 8, offset), "little")

    def set_number(self, offset: int, number: int) -> None:
        """Write a number at this offset, by a system call as well."""
        os.pwrite(self._file.fileno(), number.to_bytes(8, "little"), offset)


#: The memory that this process has mapped, by name. A sender offers the same in every sync.
_mapped: dict[str, NodeMemory] = {}


def mapped(name: str, path: str) -> NodeMemory:
    """Return the memory of this name, opened at `path` by the first call."""
    if name not in _mapped:
        _mapped[name] = NodeMemory(path)
    return _mapped[name]


def forget_others(names: set[str]) -> None:
    """Unmap all memory but that of these names."""
    for name in _mapped.keys() - names:
        del _mapped[name]
