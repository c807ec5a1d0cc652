"""Tables that people make by hand: CSV files, and folders of images with or without a file that says more of each.

A cell of a CSV is a text; a column of whole or decimal numbers, each written as that number is, becomes one of numbers, and an empty
cell is a missing value. So "007" and "5.0" stay what they are.
"""

import csv
import io
import itertools
from pathlib import Path
from typing import Any

#: What parts of a data set are called that are for training, and for validation, the first that is there.
SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "dev", "test", "train")}
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
#: Files that are looked at to tell whether a folder has images.
_MOST_LOOKED_AT = 10_000


def read_table(path: Path, limit: int | None = None) -> dict[str, list[str]]:
    """The columns of a file of comma (or, if its first line has no comma, semicolon) or tab separated values, as they are written;
    with a limit, rows of its first so many bytes.

    Raises:
        ValueError: it is no such table; the reason reads on after the file's name.
    """
    with path.open("rb") as file:
        data = file.read() if limit is None else file.read(limit)
        cut = bool(limit and file.read(1))
    try:
        text = data.decode("utf-8-sig", errors="ignore" if cut else "strict")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} is not UTF-8 ({error.reason}); save the file as UTF-8") from error
    first = text.partition("\n")[0]
    delimiter = "\t" if path.suffix == ".tsv" else ";" if "," not in first and ";" in first else ","
    csv.field_size_limit(2**31 - 1)  # a cell may be an image as base64
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    rows: list[list[str]] = []
    try:
        names += map(str.strip, next(reader, []))
        if twice := sorted({name for name in names if name and names.count(name) > 1}):
            raise ValueError(f"line 1 names columns twice: {', '.join(twice)}; give each a name of its own")
        for row in reader:
            if len(row) not in (0, len(names)) and not cut:
                said = f"line {reader.line_num} has {len(row)} cells, the first line {len(names)}"
                raise ValueError(f"{said}; put cells that have a {delimiter!r} in double quotes")
            if row:
                rows.append(row)
    except csv.Error as error:
        if not cut:
            raise ValueError(f"line {reader.line_num} can't be read ({error}); repair or delete it") from error
    if cut:  # perhaps in the middle of a row
        rows = [row for row in rows[:-1] if len(row) == len(names)]
    return {name: [row[i] for row in rows] for i, name in enumerate(names) if name}  # pandas' index has none


def typed_columns(table: dict[str, list[str]]) -> dict[str, list[Any]]:
    """The same with numbers where a whole column has numbers, and None for empty cells."""
    return {name: _typed(cells) for name, cells in table.items()}


def _typed(cells: list[str]) -> list[Any]:
    for kind in (int, float):
        try:
            if all(str(kind(cell)) == cell and cell not in ("nan", "inf", "-inf") for cell in cells if cell) and any(
                cells
            ):
                if not any(cell.endswith(".0") for cell in cells):  # a decimal that would be written otherwise
                    return [kind(cell) if cell else None for cell in cells]
        except ValueError:
            continue
    return [cell or None for cell in cells]


def rows_of_pictures(folder: Path, split: str) -> Path | dict[str, list[str]] | None:
    """Where the rows of a folder with images are: a file of `TABLES` in it (metadata.*, one named after the split, or the only one),
    or else columns file_name and label, the name of the subfolder that an image is in. None: that isn't what the folder is:
    it has rows elsewhere.

    Where there are subfolders for several splits, such as train and test, the one for `split` is meant.
    """
    root = next((folder / name for name in SPLITS[split] if _has_images(folder / name)), folder)
    if not _has_images(root):
        return None
    tables = sorted(file for file in root.iterdir() if file.suffix in TABLES and file.is_file())
    named = [file for stem in ("metadata", *SPLITS[split]) for file in tables if file.stem == stem]
    if named or len(tables) == 1:
        return (named or tables)[0]
    if tables or any(file.suffix in TABLES for file in folder.rglob("*")):
        return None
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    names = [str(file.relative_to(folder)) for file in files]
    return {"file_name": names, "label": [file.parent.name if file.parent != root else "" for file in files]}


def _has_images(folder: Path) -> bool:
    looked_at = itertools.islice(folder.rglob("*"), _MOST_LOOKED_AT) if folder.is_dir() else ()
    return any(file.suffix.lower() in IMAGE_SUFFIXES for file in looked_at)
