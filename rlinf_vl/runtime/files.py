"""Files that a crash leaves whole: written aside and renamed into place, or appended to as lines of JSON."""

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@contextmanager
def write_aside(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield `.NAME.tmp` beside `path`, for the block to write a file or a folder there, and rename that to `path` at the end.

    A reader finds the old content or the new, never a part of it. If the block raises, `path` is as it was. What a killed
    process leaves behind is mended by the next `write_aside` of the path, or by `recover`. One writer at a time.

    Args:
        durable: sync everything to the disk before the rename, and the rename after it, so that it also survives a crash of
            the machine. False suits files that are written again every second.
    """
    aside, replaced = _beside(path)
    if path.exists():
        _remove(replaced)
    _remove(aside)
    try:
        yield aside
        if durable:
            for written in [*aside.rglob("*"), aside]:
                _sync(written)
        if path.is_dir():  # no folder can be renamed over one that has files
            os.rename(path, replaced)
        os.rename(aside, path)
        if durable:
            _sync(path.parent)
    except OSError as error:
        if str(error.filename) == str(aside):  # the user has asked for `path`
            error.filename = str(path)
        raise
    finally:
        _mend(path)


def recover(folder: Path) -> list[Path]:
    """Mend what killed writers left in a folder: delete what is half written, and give a folder that was about to be replaced
    its name back. Returns those folders. Nobody may be writing there."""
    names = {path.name[1 : -len(path.suffix)] for path in folder.glob(".*") if path.suffix in (".tmp", ".replaced")}
    return [folder / name for name in sorted(names) if _mend(folder / name)]


def append_lines(path: Path, *rows: Mapping[str, Any], durable: bool = False) -> None:
    """Append each row as a line of JSON; a torn last line gets its end first. `durable`: they are on the disk afterwards.

    Raises:
        ValueError: a value is NaN or infinite, which JSON has no word for.
        OSError: the disk takes no more; the file is as it was.
    """
    _append(path, [_line(row) for row in rows], durable)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _append(path: Path, lines: Sequence[str], durable: bool) -> None:
    text = "".join(lines)
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


class LineFile:
    """A file of JSON lines whose writer goes on while the disk is full or away: lines that can't be written are kept, and
    written before the next ones. The first of each such time is a warning. Threads may share it: each line is written once.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """`durable`: lines are on the disk when `append` returns, or kept."""
        self.path = path
        self._durable = durable
        # Between writing the kept lines and clearing them, another thread's line would be lost or written twice.
        self._lock = threading.RLock()
        self._kept: list[str] = []
        self._replaces = False  # the file's content is to be replaced by the lines that are kept
        self._failed = False  # the last time

    def append(self, *rows: Mapping[str, Any]) -> None:
        """As `append_lines`, without OSError."""
        lines = [_line(row) for row in rows]
        with self._lock:
            self._kept += lines
            self._try(f"{len(self._kept)} line(s) are kept until it can")

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make these the only rows of the file, which may not be there."""
        with self._lock:
            self._kept, self._replaces = [_line(row) for row in rows], True
            self._try("lines that are to go are still there")

    def flush(self) -> None:
        """Write what is kept; OSError if it can't be written."""
        with self._lock:
            if self._replaces:
                with write_aside(self.path) as aside:
                    _append(aside, self._kept, self._durable)
            elif self._kept:
                _append(self.path, self._kept, self._durable)
            self._kept, self._replaces = [], False

    def _try(self, meanwhile: str) -> None:
        try:
            self.flush()
        except OSError as error:
            if not self._failed:
                log.warning("%s can't be written (%s); %s", self.path, error.strerror or error, meanwhile)
            self._failed = True
        else:
            self._failed = False


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of JSON lines, and the number of torn lines, which are left out."""
    rows: list[dict[str, Any]] = []
    torn = 0
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            torn += 1
    return rows, torn


def _beside(path: Path) -> tuple[Path, Path]:
    """Where the new content is written, and where a folder lies while the new one gets its name."""
    return path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.replaced")


def _mend(path: Path) -> bool:
    """Remove what is beside a path, or give it its name back if nothing has it; True if so."""
    aside, replaced = _beside(path)
    lost = replaced.exists() and not path.exists()
    if lost:
        os.rename(replaced, path)
    _remove(replaced)
    _remove(aside)
    return lost


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
