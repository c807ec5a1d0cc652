"""Sources of rows: files, dataset folders, data sets of the hub, and the embedded tasks.

`peek` reads a file's columns and number of rows in a fraction of a second, before a run.
`open_source` loads it through `datasets` (whose import takes a second) as memory-mapped rows in
Arrow's format, so that images are not decoded.
"""

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

from rlinf_vl.config.hubs import VERIFIERS_ROWS
from rlinf_vl.config.parts import load_part
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.tables import SPLITS, read_table, rows_of_pictures, typed_columns
from rlinf_vl.data.unusable import shorten

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)

HUB_PREFIX = "hf://"
SEEDS_PREFIX = "seeds://"
FILE_FORMATS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
#: Bytes of a JSON file that `peek` reads before a run. Loading finds a damaged line beyond them.
SCANNED = 2**25
#: Maximum number of files of a folder that `peek` reads; a folder with more is left to `datasets`.
_MOST_FILES = 64


class Peek(NamedTuple):
    """Columns and number of rows of a source; None for a value that needs the source loaded."""

    columns: list[str] | None
    rows: int | None


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one entry of data.train_data_paths."""

    name: str  # the entry, for error messages
    stem: str  # the beginning of its rows' ids
    rows: "datasets.Dataset"
    root: Path | None  # the folder to which image paths in rows are relative; None for the hub
    #: Column names → a view of the rows with these columns in Arrow's format, and the features.
    _views: dict[tuple[str, ...], tuple[Any, Any]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def row(self, i: int, columns: Sequence[str]) -> dict[str, Any]:
        """Return columns of row i as Python values: bytes, strings, numbers, lists and dicts."""
        names = tuple(columns)
        if names not in self._views:  # creating a view takes longer than reading a row of it
            self._views[names] = (
                self.rows.with_format("arrow", columns=list(names)),
                self.rows.features,
            )
        view, features = self._views[names]
        return {
            name: _python(features[name], value) for name, value in view[i].to_pylist()[0].items()
        }

    def plain_columns(self, excluded: Container[str]) -> list[str]:
        """Return the columns, except those in `excluded`, that hold neither images nor bytes."""
        features = self.rows.features
        return [
            name
            for name in self.rows.column_names
            if name not in excluded and _is_plain(features[name])
        ]

    def column(self, name: str) -> list[Any]:
        """Return the values of a column; None for each row if there is no such column."""
        if name not in self.rows.column_names:
            return [None] * len(self.rows)
        table: Any = self.rows.with_format("arrow", columns=[name])[:]
        feature = self.rows.features[name]  # once, since each access makes a deep copy
        return [_python(feature, value) for value in table[name].to_pylist()]

    def value_numbers(self, name: str, max_values: int) -> np.ndarray | None:
        """Return the number of each row's value in a column of plain values.

        Return None for a column of lists or mappings, one of more than `max_values` values, and
        one that is missing.
        """
        import pyarrow as pa

        schema = self.rows.features.arrow_schema
        # Images are structs, so that none is read here.
        if name not in schema.names or pa.types.is_nested(schema.field(name).type):
            return None
        table: Any = self.rows.with_format("arrow", columns=[name])[:]
        encoded = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) > max_values:
            return None
        return encoded.indices.to_numpy(zero_copy_only=False)

    def ids(self, stem: str) -> list[str]:
        """Return one unique id per row: `<stem>:<value of column id>`.

        Without such a column, or with missing or repeated values, rows are identified by number.
        """
        if "id" in self.rows.column_names:
            values = self.column("id")
            if all(isinstance(value, (str, int)) for value in values) and len(
                set(map(str, values))
            ) == len(values):
                return [f"{stem}:{value}" for value in values]
            log.warning(
                "%s: column 'id' has missing or repeated values; rows are named by number",
                self.name,
            )
        return [f"{stem}:{number}" for number in range(len(self.rows))]


def open_source(name: str, split: str) -> Source:
    """Open one entry of data.train_data_paths or data.val_data_paths.

    Args:
        name: a file of `FILE_FORMATS`; a folder of such files, of images (`rlinf_vl.data.tables`),
            or one that `save_to_disk` wrote; `hf://owner/name[:split]` (split train by default); an
            embedded task (`TOYS`); `seeds://N`, N rows that hold only their number, for an
            environment that makes its tasks from seeds; or `verifiers://NAME`, an environment's
            own rows.
        split: the part of an embedded task or of a folder with several parts, "train" or "val".

    Raises:
        ValueError: there is nothing of that kind, or it can't be read.
    """
    import datasets

    datasets.disable_progress_bars()
    if name.startswith(HUB_PREFIX):
        repository, _, hub_split = name.removeprefix(HUB_PREFIX).partition(":")
        try:
            rows = datasets.load_dataset(repository, split=hub_split or "train")
        except Exception as e:  # errors of the hub's client, the network and the builders
            raise ValueError(
                f"{name}: can't be loaded from the hub: {type(e).__name__}: {e}"
            ) from e
        return Source(name, repository, rows, None)
    if seeds := peek_seeds(name):
        numbers = list(range(seeds.rows or 0))
        problems = [f"Episode {number}" for number in numbers]
        columns = {"id": list(map(str, numbers)), "problem": problems, "seed": numbers}
        return Source(name, f"seeds-{split}", datasets.Dataset.from_dict(columns), None)
    if name.startswith(VERIFIERS_ROWS):
        environment = name.removeprefix(VERIFIERS_ROWS).partition("?")[0]
        return Source(
            name, f"{environment}-{split}", load_part("verifiers-rows")(name, split), None
        )
    if name in TOYS:
        path: Path = load_part("toy-data")(split, name)  # made on first use
        return Source(name, name, _load(name, path, split), path.parent)
    path = Path(name).expanduser()
    if not path.exists():
        raise ValueError(
            f"{name}: no such file or folder (hub datasets are named "
            f"{HUB_PREFIX}owner/name[:split])"
        )
    table = rows_of_pictures(path, split) if path.is_dir() else path
    if isinstance(table, dict):
        return Source(name, path.stem, datasets.Dataset.from_dict(table), path)
    path, stem = table or path, path.stem
    return Source(name, stem, _load(name, path, split), path if path.is_dir() else path.parent)


def _load(name: str, path: Path, split: str) -> "datasets.Dataset":
    """Load a file or folder; of several parts, the one for `split`."""
    import datasets

    try:
        peek(path)
        if FILE_FORMATS.get(path.suffix) == "csv" and path.is_file():
            return datasets.Dataset.from_dict(typed_columns(read_table(path)))
        if path.is_file():
            return datasets.load_dataset(
                FILE_FORMATS[path.suffix], data_files=[str(path)], split="train"
            )
        saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as e:  # errors of `peek`, Arrow, pandas and the builders
        # Few of them name the damaged row: `peek` finds it in the whole file.
        try:
            peek(path, scanned=2**32)
        except ValueError as peek_error:
            raise ValueError(f"{name} {peek_error}") from e
        raise ValueError(f"{name}: can't be read: {type(e).__name__}: {e}") from e
    if isinstance(loaded, datasets.Dataset):
        return loaded
    part_names = list(loaded) if len(loaded) == 1 else SPLITS[split]
    if not (matching_parts := [loaded[part] for part in part_names if part in loaded]):
        parts = ", ".join(map(str, loaded))
        raise ValueError(
            f"{name}: none of its parts {parts} is for {split}; name one of its files instead"
        )
    return matching_parts[0]


def _is_plain(feature: Any) -> bool:
    """Return whether a column with this feature holds neither images nor bytes."""
    import datasets

    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return _is_plain(feature.feature)
    if isinstance(feature, datasets.Value):
        return "binary" not in feature.dtype
    return isinstance(feature, datasets.ClassLabel) or _is_json(feature)


def _is_json(feature: Any) -> bool:
    """Return whether a column is one of mixed types, which `datasets` encodes as JSON since 4.7."""
    import datasets

    return isinstance(feature, getattr(datasets, "Json", ()))


def _python(feature: Any, value: Any) -> Any:
    """Convert a value read from Arrow to the value that was stored.

    `datasets` encodes columns of mixed types as JSON, and Arrow widens short floats.
    """
    import datasets

    if value is None:
        return None
    if _is_json(feature):
        return json.loads(value)
    if isinstance(feature, datasets.Value) and feature.dtype in ("float16", "float32"):
        return np.dtype(feature.dtype).type(value)
    if isinstance(feature, dict):
        return {key: _python(feature[key], item) for key, item in value.items()}
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return [_python(feature.feature, item) for item in value]
    return value


def peek_seeds(name: str) -> Peek | None:
    """Return columns and rows of `seeds://N`; None for another name.

    Raises:
        ValueError: N is no number of rows.
    """
    if not name.startswith(SEEDS_PREFIX):
        return None
    number = name.removeprefix(SEEDS_PREFIX)
    if not (number.isascii() and number.isdigit() and 0 < int(number) <= 10**7):
        raise ValueError(
            f"names no number of rows from 1 to 10,000,000; write {SEEDS_PREFIX}1000, say"
        )
    return Peek(["id", "problem", "seed"], int(number))


def peek(path: Path, scanned: int = SCANNED) -> Peek:
    """Read columns and number of rows of a file, or of a folder that `datasets` loads.

    Args:
        path: the file or folder.
        scanned: the number of bytes of a JSON or CSV file that are read.

    Raises:
        ValueError: it can't hold rows, or is damaged; the message continues a sentence that begins
            with the file's name.
    """
    if not path.is_dir() and path.suffix not in FILE_FORMATS:
        raise ValueError(
            f"has suffix {path.suffix!r}, which is none of {', '.join(FILE_FORMATS)}; convert it "
            "to one of them"
        )
    try:
        if path.is_dir():
            return _peek_folder(path)
        if not path.stat().st_size:
            peeked = Peek([], 0)
        elif FILE_FORMATS[path.suffix] == "csv":
            table = read_table(path, scanned)
            is_complete = path.stat().st_size <= scanned
            peeked = Peek(list(table), len(next(iter(table.values()), [])) if is_complete else None)
        else:
            peeked = _peek_parquet(path) if path.suffix == ".parquet" else _peek_json(path, scanned)
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror or error}") from error
    if peeked.rows == 0:
        raise ValueError("is empty; write at least one row to it, or leave it out")
    return peeked


def first_rows(path: Path, columns: Sequence[str], n: int = 64) -> list[dict[str, Any]]:
    """Return some columns, as far as they exist, of the first `n` rows of a file.

    The result is empty for a folder, and for a file that would have to be loaded as a whole.
    """
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            present = [name for name in columns if name in file.schema_arrow.names]
            return next((batch.to_pylist() for batch in file.iter_batches(n, columns=present)), [])
    if path.is_dir() or path.suffix == ".json" and path.stat().st_size > SCANNED:
        return []
    rows: list[dict[str, Any]] = []
    if FILE_FORMATS.get(path.suffix) == "csv":
        table = read_table(path, limit=2**20)
        cells = itertools.islice(zip(*table.values(), strict=True), n)
        return _select([dict(zip(table, row, strict=True)) for row in cells], columns)
    # One object on several lines.
    with (
        path.open(encoding="utf-8-sig") as file,
        suppress(ValueError),
    ):
        if file.read(64).lstrip().startswith("["):
            file.seek(0)
            rows = json.load(file)[:n]
        else:
            file.seek(0)
            rows += (json.loads(line) for line in itertools.islice(filter(str.strip, file), n))
    return _select(rows, columns)


def _select(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Reduce rows to some columns, as far as they exist."""
    selected = []
    for row in rows:
        selected.append({name: row[name] for name in columns if name in row})
    return selected


def _peek_parquet(path: Path) -> Peek:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return Peek(file.schema_arrow.names, file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"is no parquet file, or a damaged one ({_why(error)}); write it anew"
        ) from error


def _peek_json(path: Path, scanned: int) -> Peek:
    """Read an array of objects, one object per line, or one object over several lines."""
    with path.open("rb") as file:
        start = file.read(scanned).removeprefix(b"\xef\xbb\xbf")
        is_complete = not file.read(1)
    if start.lstrip().startswith(b"["):
        if not is_complete:
            return Peek(None, None)
        try:
            rows = json.loads(start)
        except ValueError as error:
            location = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise ValueError(f"is no JSON array: {_why(error)}{location}; repair it") from error
        return Peek(_columns(rows, "item"), len(rows))
    rows, lines = [], start.split(b"\n")
    for number, line in enumerate(lines if is_complete else lines[:-1], 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            if not rows and is_complete:
                with suppress(ValueError):
                    return Peek(_columns([json.loads(start)], "line"), 1)
            excerpt = shorten(line.decode(errors="replace").strip(), 60)
            reason = (
                f"line {number} is not JSON ({_why(error)}): {excerpt}; repair or delete that line"
            )
            raise ValueError(reason) from error
    return Peek(_columns(rows, "line"), len(rows) if is_complete else None)


def _columns(rows: list[Any], unit: str) -> list[str]:
    """Return the columns of all rows; raise ValueError, which names the `unit`, for a bad row."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{unit} {number} is {shorten(json.dumps(row), 60)}, not an object of columns; "
                "repair it"
            )
    return list(dict.fromkeys(column for row in rows for column in row))


def _peek_folder(path: Path) -> Peek:
    """Read the columns of a folder.

    It may be written by `save_to_disk`, hold images, or hold files of one of our formats only. The
    columns of another folder are unknown until `datasets` loads it.
    """
    os.listdir(path)  # raises without permission, which rglob would ignore
    if isinstance(pictures := rows_of_pictures(path, "train"), dict):
        return Peek(list(pictures), len(pictures["label"]))
    if pictures:
        return peek(pictures)
    visible_files = (
        file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")
    )
    files = sorted(itertools.islice(visible_files, _MOST_FILES))
    if not files:
        raise ValueError("holds no files; name a folder with some, or a file")
    for info in [path / "dataset_info.json", *path.glob("*/dataset_info.json")]:
        if (info.parent / "state.json").is_file() and info.is_file():
            return Peek(list(json.loads(info.read_bytes()).get("features") or ()) or None, None)
    if {file.suffix for file in files} <= {".txt", ".md"}:
        raise ValueError(
            f"holds no file of rows ({', '.join(FILE_FORMATS)}); name a folder with some, or a file"
        )
    rows = [file for file in files if file.suffix != ".md" and file.stat().st_size]
    formats = {file.suffix for file in rows}
    if len(files) == _MOST_FILES or len(formats) != 1 or not formats <= FILE_FORMATS.keys():
        return Peek(None, None)
    columns: dict[str, None] = {}
    for file in rows:
        try:
            file_columns = peek(file, scanned=2**20).columns
        except ValueError as error:
            name = file.relative_to(path)
            raise ValueError(f"holds a file that can't be used: {name} {error}") from error
        if file_columns is None:
            return Peek(None, None)
        columns |= dict.fromkeys(file_columns)
    return Peek(list(columns), None)


def _why(error: Exception) -> str:
    """Return an error's message in one line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return (str(error) or type(error).__name__).splitlines()[0]
