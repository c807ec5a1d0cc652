"""Ends what a killed worker leaves: its agents' commands, and their folders.

Run as a script, without any package, it waits for the end of the process that started it.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

#: Environment variable of commands; its value names the process that started them.
OWNER = "RLINF_VL_AGENT_OWNER"
_PREFIX = "rlinf-agent-"


def owner_name(pid: int) -> str:
    """Return the name of a process, which no other has, in another container or later.

    Raises:
        OSError: there is no such process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    # The name, which stands in brackets, may hold anything.
    start_time = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot}_{namespace}_{pid}_{start_time}"


def folder_prefix(owner: str) -> str:
    """Return how the names of the folders of an owner's commands begin."""
    return f"{_PREFIX}{owner}-"


def sweep(owner: str, folder: Path) -> None:
    """Kill all commands of an owner, with what they have started, and remove their folders."""
    mark = f"{OWNER}={owner}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
    for path in folder.glob(f"{folder_prefix(owner)}*"):
        shutil.rmtree(path, ignore_errors=True)


def sweep_ended(folder: Path) -> None:
    """Sweep for owners of this machine and container that have ended, their guards as well."""
    host_parts = owner_name(os.getpid()).split("_")[:2]
    for owner in {path.name.split("-")[2] for path in folder.glob(f"{_PREFIX}*_*_*_*-*")}:
        if owner.split("_")[:2] != host_parts:
            continue
        try:
            is_alive = owner_name(int(owner.split("_")[2])) == owner
        except (OSError, ValueError):
            is_alive = False
        if not is_alive:
            sweep(owner, folder)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sweep(sys.argv[1], Path(sys.argv[2]))
