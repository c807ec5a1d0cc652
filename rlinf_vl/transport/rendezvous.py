"""Where the members of a process group meet: a store at one of them, which listens from the moment its address is given out.

A port that is looked up, let go and listened at later may be anyone's by then.
"""

from datetime import timedelta

import torch.distributed as dist

#: The store of a rendezvous, over TCP.
Store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in __all__
#: How long whoever meets in a store waits for the others.
TIMEOUT = timedelta(minutes=30)


def listen(host: str, timeout: timedelta = TIMEOUT) -> tuple[Store, tuple[str, int]]:
    """A store at a free port of this host (its own address, as the others reach it), while it is referenced, and (host, port)
    to `find` it at. Whoever waits in it waits for `timeout`."""
    store = Store(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, (host, store.port)


def find(address: tuple[str, int], timeout: timedelta = TIMEOUT) -> Store:
    """Another process's store that listens at (host, port)."""
    return Store(*address, is_master=False, timeout=timeout, wait_for_workers=False)
