"""Servers of this host, which users' code and judges reach without a proxy."""

import os
from collections.abc import MutableMapping

#: The names under which a host's own servers are called.
THIS_HOST = ("127.0.0.1", "localhost", "::1")
#: The names of the variable; clients prefer the first.
_VARIABLES = ("no_proxy", "NO_PROXY")


def bypass_proxies(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have clients call this host's servers directly, whatever proxy the environment names.

    A proxy of another machine has no way to them, and would read keys and messages.
    """
    hosts = next((environment[name] for name in _VARIABLES if environment.get(name)), "")
    # A lone star means all hosts, and nothing beside another entry.
    if hosts.strip() != "*":
        entries = [entry.strip() for entry in hosts.split(",") if entry.strip()]
        entries += [host for host in THIS_HOST if host not in entries]
        hosts = ",".join(entries)
    for name in _VARIABLES:
        environment[name] = hosts
