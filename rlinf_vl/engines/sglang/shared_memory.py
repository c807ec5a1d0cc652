"""Removes what killed SGLang processes have left in shared memory.

SGLang ends its processes by SIGKILL, as we do, and neither its files of load figures nor the
semaphores of `multiprocessing` are unlinked then. SGLang itself sweeps in its own CI only.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
#: Files of load figures: a scheduler writes them, and the engine's own process reads them.
LOADS = "sglang_loads_"
#: Named semaphores of `multiprocessing`.
SEMAPHORES = "sem.mp-"
#: Age in seconds below which a file may have been made, and not be opened yet.
MIN_AGE_S = 10.0
#: Major and minor number of the device, and inode.
FileId = tuple[int, int, int]


def remove_abandoned(folder: Path = FOLDER) -> list[str]:
    """Unlink this user's load figures and semaphores that nobody has open; return their names.

    Load figures that only this process reads have lost their scheduler, and nobody else waits for
    them: an engine that is closed leaves its own so.
    """
    own_files = open_files(os.getpid())
    candidates: dict[Path, FileId] = {}
    for path in folder.iterdir():
        with suppress(OSError):  # another worker's sweep was faster
            status = path.stat()
            is_old = time.time() - status.st_mtime > MIN_AGE_S
            file_id = id_of(status)
            is_read_here = file_id in own_files
            is_abandoned = (
                path.name.startswith(LOADS)
                and (is_old or is_read_here)
                or path.name.startswith(SEMAPHORES)
                and is_old
                and not is_read_here
            )
            if is_abandoned and status.st_uid == os.getuid():
                candidates[path] = file_id
    if not candidates:
        return []
    for pid in set(psutil.pids()) - {os.getpid()}:
        files = open_files(pid)
        for path in [path for path, file_id in candidates.items() if file_id in files]:
            del candidates[path]
    for path in candidates:
        path.unlink(missing_ok=True)
    return sorted(path.name for path in candidates)


def open_files(pid: int) -> set[FileId]:
    """Return the files that a process has mapped or open.

    Not by their names: whoever makes a semaphore has it mapped under another one, since glibc makes
    a file and then links it to the name.
    """
    folder, files = Path(f"/proc/{pid}"), set[FileId]()
    with suppress(OSError):
        for line in (folder / "maps").read_text().splitlines():
            # Address, permissions, offset, device as hexadecimal numbers, inode.
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = device.split(":")
            files.add((int(major, 16), int(minor, 16), int(inode)))
    with suppress(OSError):
        for descriptor in (folder / "fd").iterdir():
            with suppress(OSError):
                files.add(id_of(descriptor.stat()))
    return files


def id_of(status: os.stat_result) -> FileId:
    """Return what tells a file from every other, whatever its names."""
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
