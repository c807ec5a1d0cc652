"""Meet the members of a process group: a store at one of them, which the others connect to.

It listens from the moment its address is given out: a port that is looked up, closed and listened
at later may be anyone's by then.
"""

from datetime import timedelta

import torch.distributed as dist

#: The store of a rendezvous, over TCP.
Store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in __all__
#: The time that a member waits for the others in a store.
TIMEOUT = timedelta(minutes=30)


def listen(host: str, timeout: timedelta = TIMEOUT) -> tuple[Store, tuple[str, int]]:
    """Open a store at a free port, and return it with (host, port) to `find` it at.

    It lives while it is referenced. `host` is this host's own address, as the others reach it.
    Members wait in it for `timeout`.
    """
    store = Store(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, (host, store.port)


def find(address: tuple[str, int], timeout: timedelta = TIMEOUT) -> Store:
    """Connect to another process's store that listens at (host, port)."""
    host, port = address
    return Store(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
