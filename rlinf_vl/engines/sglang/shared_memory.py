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


def remove_abandoned(folder: Path = FOLDER) -> list[str]:
    """Unlink this user's load figures and semaphores that nobody has open; return their names.

    Load figures that only this process reads have lost their scheduler, and nobody else waits for
    them: an engine that is closed leaves its own so.
    """
    own_files = open_files(os.getpid())
    candidates = {}
    for path in folder.iterdir():
        with suppress(OSError):  # another worker's sweep was faster
            status = path.stat()
            is_old = time.time() - status.st_mtime > MIN_AGE_S
            is_read_here = path.name in own_files
            is_abandoned = (
                path.name.startswith(LOADS)
                and (is_old or is_read_here)
                or path.name.startswith(SEMAPHORES)
                and is_old
                and not is_read_here
            )
            if is_abandoned and status.st_uid == os.getuid():
                candidates[path.name] = path
    if not candidates:
        return []
    for pid in set(psutil.pids()) - {os.getpid()}:
        texts = open_files(pid)
        for name in [name for name in candidates if name in texts]:
            del candidates[name]
    for path in candidates.values():
        path.unlink(missing_ok=True)
    return sorted(candidates)


def open_files(pid: int) -> str:
    """Return a text that names the files that a process has mapped or open."""
    folder, texts = Path(f"/proc/{pid}"), []
    with suppress(OSError):
        texts.append((folder / "maps").read_text())
    with suppress(OSError):
        for descriptor in (folder / "fd").iterdir():
            with suppress(OSError):
                texts.append(os.readlink(descriptor))
    return "\n".join(texts)
