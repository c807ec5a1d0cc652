"""What columns and how many rows a file has, told in a fraction of a second: `datasets` takes one to be imported alone."""

import itertools
import json
import os
from pathlib import Path
from typing import NamedTuple

FILE_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
#: Bytes of a JSON file that are looked at before a run; a damaged line beyond them is found when the file is loaded.
SCANNED = 2**25
#: Files of a folder that are looked at before a run; one with more is left to `datasets`.
_LOOKED_AT = 64


class Peek(NamedTuple):
    """Columns and number of rows; None for what can't be told without loading."""

    columns: list[str] | None
    rows: int | None


#: What the embedded task has (`rlinf_vl.toy.drawings`, which may have to be made first), by split.
TOY = {split: Peek(["id", "problem", "images", "answer"], rows) for split, rows in (("train", 5840), ("val", 152))}


def peek(path: Path, scanned: int = SCANNED) -> Peek:
    """Look at a file of rows, of JSON at its first bytes only, or at a folder that `datasets` loads.

    Raises:
        ValueError: it can't be one, or is damaged; the reason reads on after the file's name.
    """
    if path.is_dir():
        return _folder(path)
    if path.suffix not in FILE_FORMATS:
        raise ValueError(
            f"has suffix {path.suffix!r}, which is none of {', '.join(FILE_FORMATS)}; convert it to one of them"
        )
    try:
        size = path.stat().st_size
        found = (_parquet(path) if path.suffix == ".parquet" else _json(path, scanned)) if size else Peek([], 0)
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror or error}") from error
    if found.rows == 0:
        raise ValueError("is empty; write at least one row to it, or leave it out")
    return found


def _parquet(path: Path) -> Peek:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return Peek(file.schema_arrow.names, file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"is no parquet file, or a damaged one ({_why(error)}); write it anew") from error


def _json(path: Path, scanned: int) -> Peek:
    """An array of objects, one object a line, or one object."""
    with path.open("rb") as file:
        start = file.read(scanned).removeprefix(b"\xef\xbb\xbf")
        whole = not file.read(1)
    if not start.lstrip().startswith(b"["):
        return _json_lines(start, whole)
    if not whole:
        return Peek(None, None)
    try:
        rows = json.loads(start)
    except ValueError as error:
        where = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"is no JSON array: {_why(error)}{where}; repair it") from error
    return Peek(_columns(rows, "item"), len(rows))


def _json_lines(start: bytes, whole: bool) -> Peek:
    lines, rows = start.split(b"\n"), []
    for number, line in enumerate(lines if whole else lines[:-1], 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if not rows and whole:  # one object, over several lines?
                try:
                    return Peek(_columns([json.loads(start)], "line"), 1)
                except ValueError:
                    pass
            raise ValueError(
                f"line {number} is not JSON ({_why(error)}): {_shown(line)}; repair or delete that line"
            ) from error
    return Peek(_columns(rows, "line"), len(rows) if whole else None)


def _columns(rows: list, unit: str) -> list[str]:
    columns: dict[str, None] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{unit} {number} is {_shown(json.dumps(row).encode())}, not an object of columns; repair it"
            )
        columns.update(dict.fromkeys(row))
    return list(columns)


def _folder(path: Path) -> Peek:
    """The columns of a folder that `save_to_disk` wrote, and of one with files of one of our formats alone; what another one
    holds is for `datasets` to say."""
    try:
        found = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        files = sorted(itertools.islice(found, _LOOKED_AT))
        os.listdir(path)  # which rglob passes over where it may not look
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror or error}") from error
    if not files:
        raise ValueError("holds no files; name a folder with some, or a file")
    for info in [path / "dataset_info.json", *path.glob("*/dataset_info.json")]:
        if (info.parent / "state.json").is_file() and info.is_file():
            return Peek(list(json.loads(info.read_bytes()).get("features") or ()) or None, None)
    if {file.suffix for file in files} <= {".txt", ".md"}:
        raise ValueError(f"holds no file of rows ({', '.join(FILE_FORMATS)}); name a folder with some, or a file")
    rows = [file for file in files if file.suffix != ".md" and file.stat().st_size]
    kinds = {file.suffix for file in rows}
    if len(files) == _LOOKED_AT or len(kinds) != 1 or not kinds <= FILE_FORMATS.keys():
        return Peek(None, None)
    columns: dict[str, None] = {}
    for file in rows:
        try:
            named = peek(file, scanned=2**20).columns
        except ValueError as error:
            raise ValueError(f"holds {file.relative_to(path)}, which {error}") from error
        if named is None:
            return Peek(None, None)
        columns.update(dict.fromkeys(named))
    return Peek(list(columns), None)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return (str(error) or type(error).__name__).splitlines()[0]


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= 60 else text[:57] + "…"
