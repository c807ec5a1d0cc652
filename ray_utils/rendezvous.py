"""Rendezvous of the nodes of a Ray cluster: interfaces, the head's address, the token.

See docs/cluster.md.
"""

import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import NoReturn

import psutil

from rlinf_vl.runtime.cluster import reachable, read_record, record_path, write_private


class NotYet(Exception):
    """A condition that is waited for does not hold yet; the message is the reason."""


def say(message: str) -> None:
    print(f"[ray] {message}", flush=True)


def die(message: str, code: int = 1) -> NoReturn:
    print(f"[ray] error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def setting(name: str) -> str:
    return os.environ.get(name, "")


def number(name: str, default: int) -> int:
    """Return the number in an environment variable; exit if it holds anything else."""
    value = setting(name) or str(default)
    return (
        int(value)
        if value.isascii() and value.isdigit()
        else die(f"{name} must be a number, not '{value}'", 2)
    )


def first_line(path: str | Path) -> str:
    """Return the first line of a file; "" if it can't be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().partition("\n")[0].strip()
    return ""


# --- addresses ------------------------------------------------------------------------------------


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each network interface of this machine that has any."""
    addresses: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        ips = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if ips:
            addresses[name] = ips
    return addresses


def ours() -> str:
    """List this machine's interfaces and addresses, for messages."""
    return "this machine has " + ", ".join(
        f"{name} ({', '.join(ips)})" for name, ips in interfaces().items()
    )


def chosen_ip() -> str | None:
    """Return the address that RAY_INTERFACE or RAY_NODE_IP names; None if neither is set."""
    ip, name = setting("RAY_NODE_IP"), setting("RAY_INTERFACE")
    if name and name not in interfaces():
        die(f"RAY_INTERFACE={name}: no such interface with an IPv4 address; {ours()}", 2)
    candidates = interfaces()[name] if name else [ip for ips in interfaces().values() for ip in ips]
    if ip and ip not in candidates:
        die(f"RAY_NODE_IP={ip} is not an address of {name or 'this machine'}; {ours()}", 2)
    return ip or (candidates[0] if name else None)


def route_to(ip: str) -> str | None:
    """Return this machine's address on the route to another one; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Connecting a datagram socket chooses the route, and sends nothing.
        probe.connect((ip, 9))
        return probe.getsockname()[0]
    return None


def resolve(host: str) -> str | None:
    """Return the IPv4 address of a host name; None if it has none here."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return None


def head_port() -> int:
    port = number("RAY_PORT", 6379)
    return (
        port
        if 0 < port < 2**16
        else die(f"RAY_PORT must be a number from 1 to 65535, not '{port}'", 2)
    )


def head_ip(size: int) -> str:
    """Return the address that the head publishes.

    It is the chosen one, else MASTER_ADDR, else that of the default route.
    """
    usable = [
        ip for ips in interfaces().values() for ip in ips if size == 1 or not ip.startswith("127.")
    ]
    chosen, master = chosen_ip(), setting("MASTER_ADDR")
    master_ip = resolve(master) if master else None
    if chosen and chosen not in usable:
        die(f"the other nodes cannot reach {chosen}; {ours()}", 2)
    if chosen and master_ip in usable and chosen != master_ip:
        die(
            f"the other nodes look for the head at MASTER_ADDR={master} ({master_ip}), but "
            f"{chosen} is chosen here",
            2,
        )
    # Many hosts resolve their own name to a loopback address, which is no mistake.
    if master and master_ip not in usable and not (master_ip or "").startswith("127."):
        say(
            f"MASTER_ADDR={master} ({master_ip or 'unknown'}) is not an address of this machine: "
            f"is it rank 0's? {ours()}"
        )
    routed = route_to("192.0.2.1")  # an address reserved for documentation takes the default route
    for ip in (chosen, master_ip, routed, "127.0.0.1" if size == 1 else None):
        if ip in usable:
            return ip
    if len(usable) == 1:
        return usable[0]
    # Several addresses, and nothing to choose by: the user must.
    die(
        "no default route says which address the other nodes can reach; choose with "
        f"RAY_INTERFACE; {ours()}"
    )


def head_address(port: int) -> str:
    """Return the head's host:port, of MASTER_ADDR, else RAY_HEAD_FILE, else this node's record."""
    master, head_file, record = setting("MASTER_ADDR"), setting("RAY_HEAD_FILE"), read_record()
    if master:
        ip = resolve(master) or ""
        if record and ip.startswith("127."):
            # On its own machine, the head's name may resolve to a loopback address.
            return record.address
        if not ip:
            raise NotYet(f"MASTER_ADDR={master} has no address here")
        return f"{ip}:{port}"
    if head_file:
        if address := first_line(head_file):
            return address
        raise NotYet(f"{head_file} is not there yet. Is rank 0 started?")
    if record:
        return record.address
    die(
        "no cluster was started on this node; start it with ray_utils/start_ray.sh, or set "
        "MASTER_ADDR or RAY_HEAD_FILE"
    )


def unreachable(address: str, ip: str | None = None) -> str:
    """Describe why the head at `address` cannot be reached, from this machine's `ip` if known."""
    from_ip = f" from {ip}" if ip else ""
    if ip and reachable(address):
        return f"the head at {address} cannot be reached{from_ip}: wrong interface? {ours()}; RAY_INTERFACE picks one"
    if setting("RAY_HEAD_FILE") and not setting("MASTER_ADDR"):
        stale = "left by an earlier cluster? is rank 0 started?"
        return f"{setting('RAY_HEAD_FILE')} names {address}, where no Ray head answers{from_ip} ({stale})"
    return f"no Ray head answers at {address}{from_ip}. Is rank 0 started?"


# --- the token ------------------------------------------------------------------------------------


def kept_token() -> Path:
    """Return the path of this node's copy of the cluster's token, beside its record."""
    return record_path().with_suffix(".token")


def shared_token() -> Path:
    """Return the path of the token that the head shares with the other nodes.

    It lies beside RAY_HEAD_FILE; without that, it is Ray's default path.
    """
    head_file = setting("RAY_HEAD_FILE")
    return Path(f"{head_file}.token") if head_file else Path.home() / ".ray" / "auth_token"


def given_token() -> str | None:
    """Return RAY_AUTH_TOKEN, or the content of the file RAY_AUTH_TOKEN_PATH, or None."""
    path = setting("RAY_AUTH_TOKEN_PATH")
    # This node's copy doesn't count: it is deleted with its cluster.
    if setting("RAY_AUTH_TOKEN") or path in ("", str(kept_token())):
        return setting("RAY_AUTH_TOKEN") or None
    return first_line(path) or die(
        f"RAY_AUTH_TOKEN_PATH={path} is no readable file with a token", 2
    )


def new_token() -> str:
    """Return the head's token: the given one, else a new one.

    Without RAY_HEAD_FILE, it is the token of the home folder, which is made if missing.
    """
    if token := given_token():
        return token
    path = shared_token()
    if not setting("RAY_HEAD_FILE"):
        if not first_line(path):
            write_private(path, secrets.token_hex(32))
            say(f"made a token in {path}; every node needs the same one")
        return first_line(path)
    return secrets.token_hex(32)


def token_for(address: str) -> tuple[str, str]:
    """Return the token for the head at `address`, and its source: a variable or a path."""
    if token := given_token():
        return token, "RAY_AUTH_TOKEN" if setting("RAY_AUTH_TOKEN") else setting(
            "RAY_AUTH_TOKEN_PATH"
        )
    record = read_record()
    kept_paths = (
        [record.token_path] if record and record.address == address and record.runs() else []
    )
    # The file beside RAY_HEAD_FILE may be newer than this node's copy; the home folder's may be of
    # another cluster.
    paths = (
        [str(shared_token()), *kept_paths]
        if setting("RAY_HEAD_FILE")
        else [*kept_paths, str(shared_token())]
    )
    for path in paths:
        if token := first_line(path):
            return token, path
    raise NotYet(
        f"the head at {address} wants a token, and there is none in {shared_token()}; copy the "
        "head's ~/.ray/auth_token there, or set RAY_AUTH_TOKEN on every node"
    )
