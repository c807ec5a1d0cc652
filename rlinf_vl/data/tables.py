"""Tables that people make by hand: CSV files, and folders of images with or without a table.

A cell of a CSV is a text, and an empty cell a missing value. A column becomes numeric if all its
cells are whole or decimal numbers in their shortest form; "007" and "5.0" thus stay texts.
"""

import csv
import io
import itertools
from pathlib import Path
from typing import Any

#: Names of a data set's parts for training and for validation; the first one that exists is used.
SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "dev", "test", "train")}
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
#: Maximum number of files that are examined to decide whether a folder has images.
_MOST_LOOKED_AT = 10_000


def read_table(path: Path, limit: int | None = None) -> dict[str, list[str]]:
    """Return the columns of a file of comma or tab separated values, as texts.

    The separator of a file other than .tsv is a semicolon if its first line has one and no comma.

    Args:
        path: the file.
        limit: number of bytes to read; only rows that are complete in them are returned. None reads
            the whole file.

    Raises:
        ValueError: it is no such table; the message continues a sentence that begins with the
            file's name.
    """
    with path.open("rb") as file:
        data = file.read() if limit is None else file.read(limit)
        cut = bool(limit and file.read(1))
    try:
        text = data.decode("utf-8-sig", errors="ignore" if cut else "strict")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"line {line} is not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    first = text.partition("\n")[0]
    delimiter = "\t" if path.suffix == ".tsv" else ";" if "," not in first and ";" in first else ","
    csv.field_size_limit(2**31 - 1)  # a cell may hold an image as base64
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    rows: list[list[str]] = []
    try:
        names += map(str.strip, next(reader, []))
        if repeated := sorted({name for name in names if name and names.count(name) > 1}):
            raise ValueError(
                f"line 1 names columns twice: {', '.join(repeated)}; give each a name of its own"
            )
        for row in reader:
            if len(row) not in (0, len(names)) and not cut:
                mismatch = (
                    f"line {reader.line_num} has {len(row)} cells, the first line {len(names)}"
                )
                raise ValueError(
                    f"{mismatch}; put cells that have a {delimiter!r} in double quotes"
                )
            if row:
                rows.append(row)
    except csv.Error as error:
        if not cut:
            raise ValueError(
                f"line {reader.line_num} can't be read ({error}); repair or delete it"
            ) from error
    if cut:
        # The limit may cut the last row anywhere.
        rows = [row for row in rows[:-1] if len(row) == len(names)]
    columns: dict[str, list[str]] = {}
    for i, name in enumerate(names):
        if name:  # the index that pandas writes has no name
            columns[name] = [row[i] for row in rows]
    return columns


def typed_columns(table: dict[str, list[str]]) -> dict[str, list[Any]]:
    """Convert columns of numbers from text to numbers, and empty cells to None."""
    return {name: _typed(cells) for name, cells in table.items()}


def _typed(cells: list[str]) -> list[Any]:
    for kind in (int, float):
        try:
            reads_back = all(
                str(kind(cell)) == cell and cell not in ("nan", "inf", "-inf")
                for cell in cells
                if cell
            )
            # "5.0" reads back as a float, but would be written as 5.
            if reads_back and any(cells) and not any(cell.endswith(".0") for cell in cells):
                return [kind(cell) if cell else None for cell in cells]
        except ValueError:
            continue
    return [cell or None for cell in cells]


def rows_of_pictures(folder: Path, split: str) -> Path | dict[str, list[str]] | None:
    """Find the rows of a folder with images.

    If the folder has subfolders for splits, such as train and test, the one for `split` is used.

    Returns:
        The path of a table in the folder (metadata.*, one named after the split, or the only one);
        without a table, the columns file_name and label, the label being the name of an image's
        subfolder; None if the folder has no images, or its rows are elsewhere.
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
    return {
        "file_name": names,
        "label": [file.parent.name if file.parent != root else "" for file in files],
    }


def _has_images(folder: Path) -> bool:
    files = itertools.islice(folder.rglob("*"), _MOST_LOOKED_AT) if folder.is_dir() else ()
    return any(file.suffix.lower() in IMAGE_SUFFIXES for file in files)
