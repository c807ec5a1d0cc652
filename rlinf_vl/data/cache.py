"""The cache folder of the toys' data and checkpoints and of images fetched from the web."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from rlinf_vl.runtime.files import write_aside


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return `cache_dir`, else the environment's RLINF_VL_CACHE, else ~/.cache/rlinf_vl."""
    return Path(cache_dir or os.environ.get("RLINF_VL_CACHE") or "~/.cache/rlinf_vl").expanduser()


def source_version(*sources: str) -> str:
    """Return a hash of source files, 12 hex digits: as part of a path, it forces a new build."""
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[
        :12
    ]


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, a file or a folder; if it is missing, `build(path)` makes it first.

    `target` is complete or absent. If several processes need it at once, one builds it and the
    others wait.
    """
    if not target.exists():
        # Imported here: the command line calls `cache_root` where few packages are installed.
        from filelock import FileLock

        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                with write_aside(target) as aside:
                    build(aside)
    return target
