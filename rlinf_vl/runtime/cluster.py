"""The Ray cluster that a run joins, and its token. Ray is not imported here.

Invariant: a run joins a cluster whose address it was given, or one that ray_utils/start_ray.sh
started on this node. start_ray.sh leaves a record of the cluster; a private cluster leaves none, so
it is never mistaken for one to join.
"""

import json
import logging
import os
import socket
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlinf_vl.runtime.files import write_aside

log = logging.getLogger(__name__)

#: Environment variable that all processes of a node started by start_ray.sh inherit; its value
#: identifies that start.
MARK = "RLINF_VL_RAY_NODE"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A Ray node that start_ray.sh started in this network namespace."""

    address: str  #: host:port of the head's GCS
    node_ip: str
    node_id: str
    raylet_pid: int
    mark: str  #: value of `MARK` in the environment of the node's processes
    group: int  #: process group of the processes that `ray start` began
    token_path: str  #: file of the cluster's token
    head_file: str | None = None  #: RAY_HEAD_FILE that this node wrote, being the head

    def runs(self) -> bool:
        """Return whether the raylet lives: a process of its id which carries the mark, not another
        one that got its id."""
        try:
            return f"{MARK}={self.mark}".encode() in Path(
                f"/proc/{self.raylet_pid}/environ"
            ).read_bytes().split(b"\0")
        except OSError:
            return False

    def save(self) -> None:
        write_private(record_path(), json.dumps(asdict(self)))


def record_path() -> Path:
    """Return the path of this node's record: in Ray's temporary folder, one for each user and
    network namespace.

    Two hosts may share a disk, and containers their process ids, so the network tells hosts apart.
    """
    # As Ray looks for its own.
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return (
        Path(root) / f"rlinf_vl-{os.getuid()}" / f"node-{os.stat('/proc/self/ns/net').st_ino}.json"
    )


def read_record() -> NodeRecord | None:
    """Return the record of this node; None without one, or if another user put it there."""
    path = record_path()
    try:
        # The temporary folder is everybody's: a foreign record could lead a run into a foreign
        # cluster.
        if {path.stat().st_uid, path.parent.stat().st_uid} != {os.getuid()}:
            return None
        return NodeRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is unreadable and ignored: %s", path, error)
        return None


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with write_aside(path) as aside:
        aside.touch(mode=0o600)
        aside.write_text(text)


def reachable(address: str, source: str = "", timeout: float = 3) -> bool:
    """Return whether host:port accepts a connection; from the address `source` of this machine, if
    given."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection(
            (host, int(port)), timeout, source_address=(source, 0) if source else None
        ):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def use_token(token_path: str, environment: MutableMapping[str, str]) -> None:
    """Make Ray authenticate with the token in a file."""
    environment.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer it to the file
    environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=token_path)


def cluster_to_join(
    ray_address: str | None, environment: MutableMapping[str, str]
) -> tuple[str | None, str | None]:
    """Return the cluster of a run, by `cluster.ray_address`, and this machine's address there if
    known.

    `auto` is RAY_ADDRESS if that is set, else the cluster that start_ray.sh started on this node,
    else a private one: None. The token of a cluster started here, or the request for one, is put
    into `environment`; that of any other is the user's.
    """
    if ray_address == "auto":
        ray_address = environment.get("RAY_ADDRESS", "auto")
    record = read_record()
    if ray_address == "auto":
        ray_address = record.address if record and _is_up(record) else None
    if not ray_address or ray_address == "local":
        # Whoever reaches a cluster's port can run code in it. Ray makes the token of a private one.
        environment.setdefault("RAY_AUTH_MODE", "token")
        return None, None
    if record is None or record.address != ray_address:
        return ray_address, None
    use_token(record.token_path, environment)
    return ray_address, record.node_ip


def _is_up(record: NodeRecord) -> bool:
    if not record.runs():
        why = "its Ray node has ended"
    elif not reachable(record.address):
        why = "its head does not answer"
    else:
        return True
    log.warning(
        "not joining the cluster at %s that start_ray.sh started on this node: %s",
        record.address,
        why,
    )
    return False
