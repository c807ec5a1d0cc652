"""Ends what a session of tests started, however the session ends: `python guard.py PID MARK` waits for the process PID.

Every process whose environment has MARK, and every child of one, is killed, and the hosts (tests/hosts.py) of one are removed.
A session that ends by itself has left nothing of this; one that was interrupted or killed has.
"""

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

NAMESPACES = Path("/run/netns")


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has NAME=VALUE, and their descendants, but for this process."""
    name, _, value = mark.partition("=")
    marked: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                marked |= {p.pid: p for p in (process, *process.children(recursive=True))}
        except psutil.Error:
            continue  # gone, or somebody else's
    return [process for pid, process in marked.items() if pid != os.getpid()]


def end_all(mark: str, within: float = 20) -> None:
    """Kill what has the mark until nothing has, since a process that is killed late may have started another."""
    deadline = time.monotonic() + within
    while (processes := marked_processes(mark)) and time.monotonic() < deadline:
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=2)


def remove_hosts(pids: set[int]) -> None:
    """Remove the namespaces, switches and folders of tests/hosts.py that are named after one of the processes."""
    for owner in {pid % 10**6 for pid in pids}:
        for namespace in NAMESPACES.glob(f"rlinf{owner}[a-f]"):
            subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True)
            for link in (f"rv{owner}{namespace.name[-1]}s", f"rv{owner}"):  # the cable, the switch
                subprocess.run(["ip", "link", "del", link], capture_output=True)
        for folder in Path(tempfile.gettempdir()).glob(f"rc{owner}-*"):
            for mounted in folder.glob("*/shm"):
                subprocess.run(["umount", "-l", mounted], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the session's process, and end what is left of it."""
    session, mark = int(sys.argv[1]), sys.argv[2]
    try:
        handle = os.pidfd_open(session)
    except ProcessLookupError:
        pass
    else:
        select.select([handle], [], [])
    pids = {session} | {process.pid for process in marked_processes(mark)}
    end_all(mark)
    remove_hosts(pids)


if __name__ == "__main__":
    main()
