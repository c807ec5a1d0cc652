"""The cache folder, and what is made in it once: the toy's data and checkpoint, and images fetched from the web."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """`cache_dir`, else the environment's RLINF_VL_CACHE, else ~/.cache/rlinf_vl."""
    return Path(cache_dir or os.environ.get("RLINF_VL_CACHE") or "~/.cache/rlinf_vl").expanduser()


def source_version(*sources: str) -> str:
    """Twelve hex digits that change whenever one of the source files does: what they made is then made anew."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:12]


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target` (file or folder), after `build(path)` made it if it was missing.

    Built aside, synced and renamed: `target` is complete or absent. Of processes that ask at once, one builds and the
    others wait for it; what a killed builder left aside is removed by the next.
    """
    if target.exists():
        return target
    from filelock import FileLock  # the command line looks at `cache_root` where little is installed

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.exists():
            return target
        for stale in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            made = aside / target.name
            build(made)
            for path in [made, *made.rglob("*"), aside]:
                make_durable(path)
            made.rename(target)
            make_durable(target.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def make_durable(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
