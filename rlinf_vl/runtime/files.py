"""Files that a crash leaves whole: written aside and renamed into place, or appended to as lines of
JSON."""

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
    """Yield `.NAME.tmp` beside `path`, for the block to write a file or a folder there; then rename
    it to `path`.

    A reader finds the old content or the new, never a part of it. If the block raises, `path` is as
    it was. The remains of a killed process are removed by the next `write_aside` of the path, or by
    `recover`. One writer at a time.

    Args:
        durable: sync everything to the disk before the rename, and the rename after it, so that it
            also survives a crash of the machine. False suits files that are written again every
            second.
    """
    aside, replaced = _temporary_paths(path)
    if path.exists():
        _remove(replaced)
    _remove(aside)
    try:
        yield aside
        if durable:
            for written in [*aside.rglob("*"), aside]:
                _sync(written)
        if path.is_dir():  # rename can't replace a folder that has files
            os.rename(path, replaced)
        os.rename(aside, path)
        if durable:
            _sync(path.parent)
    except OSError as error:
        if str(error.filename) == str(aside):  # the user knows `path` only
            error.filename = str(path)
        raise
    finally:
        _mend(path)


def recover(folder: Path) -> list[Path]:
    """Mend the remains of killed writers in a folder.

    Half-written content is deleted. A folder that was about to be replaced gets its name back;
    those folders are returned. Nobody may be writing there.
    """
    names = {
        path.name[1 : -len(path.suffix)]
        for path in folder.glob(".*")
        if path.suffix in (".tmp", ".replaced")
    }
    return [folder / name for name in sorted(names) if _mend(folder / name)]


def append_lines(path: Path, *rows: Mapping[str, Any], durable: bool = False) -> None:
    """Append each row as a line of JSON; a torn last line is ended first.

    Args:
        durable: sync the lines to the disk.

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
        unwritten = memoryview(text.encode())
        try:
            # an unbuffered write may take a part of the bytes, such as on a disk that fills up
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


class LineFile:
    """A file of JSON lines whose writer goes on while the disk is full or away.

    Lines that can't be written are kept, and written before the next ones. The first failure of
    each such time is a warning. Threads may share it: each line is written once.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """Open nothing yet; `durable`: lines are on the disk when `append` returns, or kept."""
        self.path = path
        self._durable = durable
        # Between writing the unwritten lines and clearing them, another thread's line would be lost
        # or written twice.
        self._lock = threading.RLock()
        self._unwritten_lines: list[str] = []
        self._replaces_content = False  # the unwritten lines shall replace the file's content
        self._last_write_failed = False

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append each row as a line; if the disk refuses, keep the lines and write them later."""
        lines = [_line(row) for row in rows]
        with self._lock:
            self._unwritten_lines += lines
            self._try(f"{len(self._unwritten_lines)} line(s) are kept until it can")

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make these the only rows of the file, which may be missing."""
        with self._lock:
            self._unwritten_lines, self._replaces_content = [_line(row) for row in rows], True
            self._try("lines that are to go are still there")

    def flush(self) -> None:
        """Write the unwritten lines; OSError if they can't be written."""
        with self._lock:
            if self._replaces_content:
                with write_aside(self.path) as aside:
                    _append(aside, self._unwritten_lines, self._durable)
            elif self._unwritten_lines:
                _append(self.path, self._unwritten_lines, self._durable)
            self._unwritten_lines, self._replaces_content = [], False

    def _try(self, meanwhile: str) -> None:
        """Write the unwritten lines; if that fails, warn once, with the state `meanwhile`."""
        try:
            self.flush()
        except OSError as error:
            if not self._last_write_failed:
                log.warning(
                    "%s can't be written (%s); %s", self.path, error.strerror or error, meanwhile
                )
            self._last_write_failed = True
        else:
            self._last_write_failed = False


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a file of JSON lines, and the number of torn lines, which are left
    out."""
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


def _temporary_paths(path: Path) -> tuple[Path, Path]:
    """Return the path at which new content is written, and that of a folder while the new one is
    renamed to its name."""
    return path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.replaced")


def _mend(path: Path) -> bool:
    """Remove the temporary paths, or rename a replaced folder back if nothing has its name; True if
    so."""
    aside, replaced = _temporary_paths(path)
    is_lost = replaced.exists() and not path.exists()
    if is_lost:
        os.rename(replaced, path)
    _remove(replaced)
    _remove(aside)
    return is_lost


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
