"""Where rows come from: files, dataset folders, hub names and the embedded tasks.

`peek` tells a file's columns and number of rows in a fraction of a second, before a run; `open_source` loads it through
`datasets` (which takes a second to import) as memory-mapped rows in Arrow's own form, so that images are never decoded.
"""

import importlib
import itertools
import json
import logging
import os
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.tables import SPLITS, read_table, rows_of_pictures, typed_columns
from rlinf_vl.data.unusable import shorten

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)

HUB_PREFIX = "hf://"
SEEDS_PREFIX = "seeds://"
FILE_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv"}
#: Bytes of a JSON file that `peek` reads before a run; a damaged line beyond them is found when the file is loaded.
SCANNED = 2**25
#: Files of a folder that `peek` reads; a folder with more is left to `datasets`.
_MOST_FILES = 64


class Peek(NamedTuple):
    """Columns and number of rows; None for what can't be told without loading."""

    columns: list[str] | None
    rows: int | None


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one entry of data.train_data_paths."""

    name: str  # that entry, as errors show it
    stem: str  # the beginning of its rows' ids
    rows: "datasets.Dataset"
    root: Path | None  # the folder that image paths in rows are relative to; None for the hub
    #: Columns → rows of these in Arrow's form, and what all columns hold.
    _views: dict[tuple[str, ...], tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    def row(self, i: int, columns: Sequence[str]) -> dict[str, Any]:
        """The wanted columns of row i as Python values: bytes, strings, numbers, lists and dicts."""
        wanted = tuple(columns)
        if wanted not in self._views:  # making one takes longer than reading a row of it
            self._views[wanted] = self.rows.with_format("arrow", columns=list(wanted)), self.rows.features
        view, features = self._views[wanted]
        return {name: _python(features[name], value) for name, value in view[i].to_pylist()[0].items()}

    def plain_columns(self, known: Container[str]) -> list[str]:
        """Columns beside `known` that hold no images and no bytes."""
        features = self.rows.features
        return [name for name in self.rows.column_names if name not in known and _is_plain(features[name])]

    def column(self, name: str) -> list[Any]:
        """Values of a column by row; None in each where there is no such column."""
        if name not in self.rows.column_names:
            return [None] * len(self.rows)
        table: Any = self.rows.with_format("arrow", columns=[name])[:]
        feature = self.rows.features[name]  # a deep copy
        return [_python(feature, value) for value in table[name].to_pylist()]

    def ids(self, stem: str) -> list[str]:
        """One unique id per row: `<stem>:<value of column id>`, or the row's number where there is no such column."""
        if "id" in self.rows.column_names:
            named = self.column("id")
            if all(isinstance(value, (str, int)) for value in named) and len(set(map(str, named))) == len(named):
                return [f"{stem}:{value}" for value in named]
            log.warning("%s: column 'id' has missing or repeated values; rows are named by number", self.name)
        return [f"{stem}:{number}" for number in range(len(self.rows))]


def open_source(name: str, split: str) -> Source:
    """Open one entry of data.train_data_paths or data.val_data_paths.

    Args:
        name: a file of `FILE_FORMATS`; a folder of them, of images (`rlinf_vl.data.tables`), or one that `save_to_disk` wrote;
            `hf://owner/name[:split]` (split train unless named); an embedded task (`TOYS`); or `seeds://N`, N rows of nothing but
            their number, for an environment that makes its tasks from seeds.
        split: "train" or "val": which part of an embedded task or of a folder with several parts.

    Raises:
        ValueError: nothing of that kind is there, or it can't be read.
    """
    import datasets

    datasets.disable_progress_bars()
    if name.startswith(HUB_PREFIX):
        repository, _, hub_split = name.removeprefix(HUB_PREFIX).partition(":")
        try:
            rows = datasets.load_dataset(repository, split=hub_split or "train")
        except Exception as e:  # the hub's client raises its own, the network's and the builders' errors
            raise ValueError(f"{name}: can't be loaded from the hub: {type(e).__name__}: {e}") from e
        return Source(name, repository, rows, None)
    if seeds := peek_seeds(name):
        numbers = list(range(seeds.rows or 0))
        problems = [f"Episode {number}" for number in numbers]
        columns = {"id": list(map(str, numbers)), "problem": problems, "seed": numbers}
        return Source(name, f"seeds-{split}", datasets.Dataset.from_dict(columns), None)
    if name in TOYS:  # its file is made on first use, by a room that imports this one
        path: Path = importlib.import_module("rlinf_vl.toy.task").toy_dataset_path(split, name)
        return Source(name, name, _load(name, path, split), path.parent)
    path = Path(name).expanduser()
    if not path.exists():
        raise ValueError(f"{name}: no such file or folder (hub datasets are named {HUB_PREFIX}owner/name[:split])")
    found = rows_of_pictures(path, split) if path.is_dir() else path
    if isinstance(found, dict):
        return Source(name, path.stem, datasets.Dataset.from_dict(found), path)
    path, stem = found or path, path.stem
    return Source(name, stem, _load(name, path, split), path if path.is_dir() else path.parent)


def _load(name: str, path: Path, split: str) -> "datasets.Dataset":
    import datasets

    try:
        peek(path)
        if FILE_FORMATS.get(path.suffix) == "csv" and path.is_file():
            return datasets.Dataset.from_dict(typed_columns(read_table(path)))
        if path.is_file():
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=[str(path)], split="train")
        saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as e:  # `peek`'s, or Arrow's, pandas' and the builders' own, few of which name a row
        try:
            peek(path, scanned=2**32)
        except ValueError as known:
            raise ValueError(f"{name} {known}") from e
        raise ValueError(f"{name}: can't be read: {type(e).__name__}: {e}") from e
    if isinstance(loaded, datasets.Dataset):
        return loaded
    wanted = list(loaded) if len(loaded) == 1 else SPLITS[split]
    if not (found := [loaded[part] for part in wanted if part in loaded]):
        parts = ", ".join(map(str, loaded))
        raise ValueError(f"{name}: none of its parts {parts} is for {split}; name one of its files instead")
    return found[0]


def _is_plain(feature: Any) -> bool:
    import datasets

    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return _is_plain(feature.feature)
    if isinstance(feature, datasets.Value):
        return "binary" not in feature.dtype
    return isinstance(feature, (datasets.Json, datasets.ClassLabel))


def _python(feature: Any, value: Any) -> Any:
    """Undo the JSON encoding that `datasets` gives to columns of mixed types, and the widening of short floats by Arrow;
    leave everything else as stored."""
    import datasets

    if value is None:
        return None
    if isinstance(feature, datasets.Json):
        return json.loads(value)
    if isinstance(feature, datasets.Value) and feature.dtype in ("float16", "float32"):
        return np.dtype(feature.dtype).type(value)
    if isinstance(feature, dict):
        return {key: _python(feature[key], item) for key, item in value.items()}
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return [_python(feature.feature, item) for item in value]
    return value


def peek_seeds(name: str) -> Peek | None:
    """What `seeds://N` holds; None for another name. Raises ValueError: N is no number of rows."""
    if not name.startswith(SEEDS_PREFIX):
        return None
    number = name.removeprefix(SEEDS_PREFIX)
    if not (number.isascii() and number.isdigit() and 0 < int(number) <= 10**7):
        raise ValueError(f"names no number of rows from 1 to 10,000,000; write {SEEDS_PREFIX}1000, say")
    return Peek(["id", "problem", "seed"], int(number))


def peek(path: Path, scanned: int = SCANNED) -> Peek:
    """Columns and rows of a file (of JSON, its first bytes are read), or of a folder that `datasets` loads.

    Raises:
        ValueError: it can't hold rows, or is damaged; the reason reads on after the file's name.
    """
    if not path.is_dir() and path.suffix not in FILE_FORMATS:
        raise ValueError(
            f"has suffix {path.suffix!r}, which is none of {', '.join(FILE_FORMATS)}; convert it to one of them"
        )
    try:
        if path.is_dir():
            return _peek_folder(path)
        if not path.stat().st_size:
            found = Peek([], 0)
        elif FILE_FORMATS[path.suffix] == "csv":
            table = read_table(path, scanned)
            whole = path.stat().st_size <= scanned
            found = Peek(list(table), len(next(iter(table.values()), [])) if whole else None)
        else:
            found = _peek_parquet(path) if path.suffix == ".parquet" else _peek_json(path, scanned)
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror or error}") from error
    if found.rows == 0:
        raise ValueError("is empty; write at least one row to it, or leave it out")
    return found


def first_rows(path: Path, columns: Sequence[str], n: int = 64) -> list[dict[str, Any]]:
    """These columns of the first rows of a file, those that it has; none of a folder or a file that must be loaded for that."""
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            there = [name for name in columns if name in file.schema_arrow.names]
            return next((batch.to_pylist() for batch in file.iter_batches(n, columns=there)), [])
    if path.is_dir() or path.suffix == ".json" and path.stat().st_size > SCANNED:
        return []
    rows: list[dict[str, Any]] = []
    if FILE_FORMATS.get(path.suffix) == "csv":
        table = read_table(path, limit=2**20)
        cells = itertools.islice(zip(*table.values(), strict=True), n)
        rows = [dict(zip(table, row, strict=True)) for row in cells]
        return [{name: row[name] for name in columns if name in row} for row in rows]
    with path.open(encoding="utf-8-sig") as file, suppress(ValueError):  # one object over several lines
        if file.read(64).lstrip().startswith("["):
            file.seek(0)
            rows = json.load(file)[:n]
        else:
            file.seek(0)
            rows += (json.loads(line) for line in itertools.islice(filter(str.strip, file), n))
    return [{name: row[name] for name in columns if name in row} for row in rows]


def _peek_parquet(path: Path) -> Peek:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return Peek(file.schema_arrow.names, file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"is no parquet file, or a damaged one ({_why(error)}); write it anew") from error


def _peek_json(path: Path, scanned: int) -> Peek:
    """An array of objects, one object a line, or one object over several lines."""
    with path.open("rb") as file:
        start = file.read(scanned).removeprefix(b"\xef\xbb\xbf")
        whole = not file.read(1)
    if start.lstrip().startswith(b"["):
        if not whole:
            return Peek(None, None)
        try:
            rows = json.loads(start)
        except ValueError as error:
            where = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise ValueError(f"is no JSON array: {_why(error)}{where}; repair it") from error
        return Peek(_columns(rows, "item"), len(rows))
    rows, lines = [], start.split(b"\n")
    for number, line in enumerate(lines if whole else lines[:-1], 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            if not rows and whole:
                with suppress(ValueError):
                    return Peek(_columns([json.loads(start)], "line"), 1)
            shown = shorten(line.decode(errors="replace").strip(), 60)
            reason = f"line {number} is not JSON ({_why(error)}): {shown}; repair or delete that line"
            raise ValueError(reason) from error
    return Peek(_columns(rows, "line"), len(rows) if whole else None)


def _columns(rows: list[Any], unit: str) -> list[str]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{unit} {number} is {shorten(json.dumps(row), 60)}, not an object of columns; repair it")
    return list(dict.fromkeys(column for row in rows for column in row))


def _peek_folder(path: Path) -> Peek:
    """The columns of a folder that `save_to_disk` wrote, of one of images, and of one with files of one of our formats alone; what
    another holds is for `datasets` to say."""
    os.listdir(path)  # raises where it may not be read; rglob passes over that
    if isinstance(pictures := rows_of_pictures(path, "train"), dict):
        return Peek(list(pictures), len(pictures["label"]))
    if pictures:
        return peek(pictures)
    found = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    files = sorted(itertools.islice(found, _MOST_FILES))
    if not files:
        raise ValueError("holds no files; name a folder with some, or a file")
    for info in [path / "dataset_info.json", *path.glob("*/dataset_info.json")]:
        if (info.parent / "state.json").is_file() and info.is_file():
            return Peek(list(json.loads(info.read_bytes()).get("features") or ()) or None, None)
    if {file.suffix for file in files} <= {".txt", ".md"}:
        raise ValueError(f"holds no file of rows ({', '.join(FILE_FORMATS)}); name a folder with some, or a file")
    rows = [file for file in files if file.suffix != ".md" and file.stat().st_size]
    formats = {file.suffix for file in rows}
    if len(files) == _MOST_FILES or len(formats) != 1 or not formats <= FILE_FORMATS.keys():
        return Peek(None, None)
    columns: dict[str, None] = {}
    for file in rows:
        try:
            named = peek(file, scanned=2**20).columns
        except ValueError as error:
            raise ValueError(f"holds {file.relative_to(path)}, which {error}") from error
        if named is None:
            return Peek(None, None)
        columns |= dict.fromkeys(named)
    return Peek(list(columns), None)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return (str(error) or type(error).__name__).splitlines()[0]
