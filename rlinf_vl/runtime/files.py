"""Files that a crash leaves whole: written aside and renamed into place, or appended to as lines of JSON."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    """
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())


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


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrite a file of JSON lines with the rows that are wanted, and return them; torn lines go. No file: no rows."""
    if not path.exists():
        return []
    rows = [row for row in read_lines(path)[0] if wanted(row)]
    with write_aside(path) as aside:
        aside.touch()
        append_lines(aside, *rows)
    return rows


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
