"""Ports of an engine, which no other engine of this host has while it lives.

With several groups of attention SGLang derives all ports from one default, so that a second engine
of the host meets the first one's; for others it draws a port that a process binds only later.
"""

import socket

#: Ports of a block. SGLang uses eight of them, and the first one marks the block as taken.
BLOCK = 16
#: The ports that blocks are cut from: below those that Linux hands out by itself (32768 and up),
#: and above those of Ray's workers (10002 to 19999).
RANGE = range(20000, 32000, BLOCK)
#: The difference that SGLang adds to its argument `port` for its first derived port.
DERIVED = 233


class PortBlock:
    """A block of free ports. Its first port is bound as long as it is held.

    Attributes:
        arguments: SGLang's server arguments with which all ports are of the block.
    """

    def __init__(self) -> None:
        """Take the first block of this host whose ports are all free.

        Raises RuntimeError if there is none.
        """
        for first in RANGE:
            mark = _bound(first)
            if mark is None:
                continue
            if all(_is_free(port) for port in range(first + 1, first + BLOCK)):
                self._mark = mark
                self.arguments = {"nccl_port": first + 1, "port": first + 2 - DERIVED}
                return
            mark.close()
        raise RuntimeError(
            f"no {BLOCK} ports in a row are free between {RANGE.start} and {RANGE.stop} on this "
            "host, and an SGLang engine wants them; end what listens there (`ss -ltnp` lists it)"
        )

    def close(self) -> None:
        """Leave the block to other engines, once nothing of this one listens any more."""
        self._mark.close()


def _bound(port: int) -> socket.socket | None:
    """Return a socket bound to the port, or None if another one has it."""
    bound = socket.socket()
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        return None
    return bound


def _is_free(port: int) -> bool:
    bound = _bound(port)
    if bound is not None:
        bound.close()
    return bound is not None
