"""Trajectories and their images for the report: which ones are in it, and their columns as arrays that a browser reads.

Text is a table of distinct strings and an index into it. What tokens have is one array over all trajectories, and one array
of offsets cuts them all; of an image's placeholders, hundreds of the same, the first one is there. Nothing outside the run's
folder is read, whatever an image's path says.
"""

import hashlib
import io
import json
from collections import Counter, namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vl.observe.trajectories import SCHEMA

FILL = {pa.float32(): (np.float32, np.nan), pa.int32(): (np.int32, -1), pa.bool_(): (np.uint8, 1)}
"""For a token without a value, by the column's type: the type it has in the browser, and its value there."""
BYTES_PER_TRAJECTORY, BYTES_PER_TOKEN = 1000, 20
"""What a trajectory takes in the report before compression, its images aside, and what each of its tokens adds."""
SIZES = ((0.5, 1_000_000, 2048), (0.75, 100_000, 1024), (1.0, 10_000, 256))
"""Up to this share of the images' room that is used, an image of more than so many bytes or pixels across is made that small: one
is read at full size in most reports, and a report of many shows all of them small rather than a few."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

_Group = namedtuple("_Group", "file split rows bytes")


def add_section(sections: bytearray, data: np.ndarray) -> dict[str, Any]:
    """Append an array; returns a reference to it, {"type", "at", "count"}, `at` in bytes."""
    sections += bytes(-len(sections) % 4)  # a browser's arrays are aligned
    reference = {"type": data.dtype.str[1:], "at": len(sections), "count": len(data)}
    sections += data.tobytes()
    return reference


def read_image(run: Path, name: str) -> bytes:
    """The encoded image of this path in the run's folder. Raises ValueError: why it is left out, for a reader."""
    file = (run / name).resolve()
    if not file.is_relative_to(run.resolve()):
        raise ValueError("outside the run's folder")
    if not file.is_file():  # nor wait for a pipe
        raise ValueError("missing")
    return file.read_bytes()


class ImageStore:
    """Images of all runs, each distinct file's bytes once, up to `max_bytes` in total."""

    def __init__(self, sections: bytearray, max_bytes: int) -> None:
        self._sections = sections
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: dict[bytes, int] = {}
        self.images: list[dict[str, Any]] = []

    def add(self, run: Path, name: str) -> int:
        """The image's index.

        Raises:
            ValueError: why it is left out, for a reader.
        """
        data = read_image(run, name)
        digest = hashlib.sha256(data).digest()
        if digest not in self._known:
            try:
                used = self._bytes / self._max_bytes
                most, across = next((size for share, *size in SIZES if used <= share), SIZES[-1][1:])
                shown, kind, size = _shrink(data, most, across)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise ValueError("not an image that can be shown") from error
            if self._bytes + len(shown) > self._max_bytes:
                raise ValueError(f"there is room for {self._max_bytes:,} bytes only")
            self._bytes += len(shown)
            self._known[digest] = len(self.images)
            reference = add_section(self._sections, np.frombuffer(shown, np.uint8))
            self.images.append({"data": reference, "type": f"image/{kind.lower()}", "size": size})
        return self._known[digest]


def read_trajectories(run: Path, max_bytes: int, notes: list[str]) -> pa.Table:
    """Trajectories of a run in the order of steps, as many as fit, with all columns of `SCHEMA` and further ones per token.

    Whole groups are chosen, evenly over the steps: first of validation, up to three quarters of the bytes, then of training.
    """
    groups = []
    for file in sorted(run.glob("trajectories/step_*.parquet"), key=lambda f: (len(f.name), f.name)):
        groups += _groups_of(file, _read(file, notes, ("split", "group_id", "response_mask", "response_ids")))
    if not groups:
        notes.append("No trajectories are stored.")
    rows_of: dict[Path, list[int]] = {}
    for split in ("validation", "training"):
        of_split = [g for g in groups if (g.split == "val") == (split == "validation")]
        share = 0.75 if split == "validation" and len(of_split) < len(groups) else 1
        chosen = _choose(of_split, int(max_bytes * share))
        max_bytes -= sum(g.bytes for g in chosen)
        kept, total = sum(len(g.rows) for g in chosen), sum(len(g.rows) for g in of_split)
        if kept < total:
            notes.append(f"{total - kept:,} of {total:,} {split} trajectories left out, evenly over the steps.")
        for group in chosen:
            rows_of.setdefault(group.file, []).extend(group.rows)
    tables = [SCHEMA.empty_table()]
    for file in dict.fromkeys(group.file for group in groups if group.file in rows_of):
        if len(table := _read(file, notes)):  # empty if another column is broken
            tables.append(table.take(sorted(rows_of[file])))
    return pa.concat_tables(tables, promote_options="default")


def encode_trajectories(table: pa.Table, run: Path, sections: bytearray, images: ImageStore, notes: list[str]) -> dict:
    """Column name → reference into `sections`, or {"table": distinct texts, "index": reference}; those that `SCHEMA` doesn't name
    are the pairs (name, reference) of "token_columns"."""
    columns: dict[str, Any] = {"count": len(table), "token_columns": []}
    lengths = _lengths(table["tokens"].combine_chunks())
    kept = _kept(table, lengths)
    columns["offsets"] = add_section(sections, _starts(kept)[_starts(lengths)].astype(np.int32))
    table = _shift_turns(table, lengths, kept)
    for name, column in ((name, table[name].combine_chunks()) for name in table.column_names if name != "images"):
        if column.type == pa.string() or name == "tokens":
            texts = (column.flatten().filter(pa.array(kept)) if name == "tokens" else column).dictionary_encode()
            index = texts.indices.fill_null(-1).to_numpy().astype(np.int32)
            columns[name] = {"table": texts.dictionary.to_pylist(), "index": add_section(sections, index)}
        elif not pa.types.is_list(column.type):
            fill = 0 if pa.types.is_integer(column.type) else np.nan
            columns[name] = add_section(sections, column.cast(pa.float32()).fill_null(fill).to_numpy())
        elif name in SCHEMA.names:
            columns[name] = add_section(sections, _align(column, lengths)[kept])
        else:
            columns["token_columns"].append((name, add_section(sections, _align(column, lengths)[kept])))
    shown = table["images"].combine_chunks()
    columns["image_offsets"] = add_section(sections, _starts(_lengths(shown)).astype(np.int32))
    paths = shown.flatten().dictionary_encode()
    names, places = paths.dictionary.to_pylist(), paths.indices.fill_null(-1).to_numpy()
    numbers, last, reasons = np.full(len(names) + 1, -1, np.int32), np.zeros(len(names) + 1, np.int64), Counter()
    last[places] = np.arange(len(places))
    for k in np.argsort(-last[:-1]):  # those shown latest come first, should there be no room for all
        try:
            numbers[k] = images.add(run, names[k])
        except (ValueError, OSError) as error:
            reasons[getattr(error, "strerror", None) or str(error)] += 1
    notes += [f"{count} image{'s' if count > 1 else ''} left out: {reason}." for reason, count in reasons.items()]
    return columns | {"images": add_section(sections, numbers[places])}


def _groups_of(file: Path, index: pa.Table) -> list[_Group]:
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(index["split"].to_pylist(), index["group_id"].to_pylist(), strict=True)):
        rows_of.setdefault(key, []).append(row)
    lengths = _lengths(index["response_mask"].combine_chunks())
    ends = _starts(_kept(index, lengths))[_starts(lengths)]
    sizes = BYTES_PER_TRAJECTORY + BYTES_PER_TOKEN * np.diff(ends)
    return [_Group(file, split, rows, int(sizes[rows].sum())) for (split, _), rows in rows_of.items()]


def _kept(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Which tokens of all trajectories are in the report: all but those that were not sampled and repeat the one before."""
    ids, mask = (_align(table[name].combine_chunks(), lengths) for name in ("response_ids", "response_mask"))
    repeats = (ids[1:] == ids[:-1]) & (ids[1:] >= 0) & ~mask[1:].astype(bool) & ~mask[:-1].astype(bool)
    kept = np.concatenate([np.ones(min(1, len(ids)), bool), ~repeats])
    kept[(starts := _starts(lengths))[starts < len(kept)]] = True
    return kept


def _shift_turns(table: pa.Table, lengths: np.ndarray, kept: np.ndarray) -> pa.Table:
    """Make positions in "turns" places among the kept tokens."""
    layouts = table["turns"].to_pylist()
    counts, starts = _starts(kept), _starts(lengths)
    for row, text in enumerate(layouts):
        places = counts[starts[row] : starts[row + 1] + 1] - counts[starts[row]]
        try:
            layout = json.loads(text or "{}")
            turns = layout.get("turns", ())
            if places[-1] < lengths[row]:
                layout["sequences"] = [int(places[at]) for at in layout["sequences"]]
                layout["turns"] = [
                    t | {at: int(places[t[at]]) for at in ("start", "end", "thought") if at in t} for t in turns
                ]
                layouts[row] = json.dumps(layout)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue  # the page shows such a trajectory as one text
    return table.set_column(table.column_names.index("turns"), "turns", pa.array(layouts, pa.string()))


def _choose(groups: Sequence[_Group], max_bytes: int) -> list[_Group]:
    """All groups if they fit, else evenly spaced ones."""
    total = sum(g.bytes for g in groups)
    if total <= max_bytes:
        return list(groups)
    chosen = [groups[int(i)] for i in np.linspace(0, len(groups) - 1, len(groups) * max_bytes // total).round()]
    while sum(g.bytes for g in chosen) > max_bytes:
        chosen.pop(len(chosen) // 2)
    return chosen


def _read(file: Path, notes: list[str], names: Sequence[str] = ()) -> pa.Table:
    """Columns of `SCHEMA` by name, null where the file has none; without names all of them, and further ones that have a number
    per token, as float32. A broken file has no rows, and a note."""
    fields = [SCHEMA.field(name) for name in names or SCHEMA.names]
    try:
        with pq.ParquetFile(file) as parquet:
            found = {field.name: field.type for field in parquet.schema_arrow}
            further = [name for name, kind in found.items() if name not in SCHEMA.names and _is_numbers(kind)]
            fields += [pa.field(name, pa.list_(pa.float32())) for name in (() if names else further)]
            table = parquet.read(columns=[field.name for field in fields if field.name in found])
            count = parquet.metadata.num_rows
        columns = [table[f.name].cast(f.type) if f.name in found else pa.nulls(count, f.type) for f in fields]
        table = pa.table(columns, schema=pa.schema(fields))
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, ValueError):
        notes.append(f"{file.parent.name}/{file.name} could not be read and is left out.")
        return pa.schema(fields).empty_table()


def _is_numbers(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type) and not pa.types.is_temporal(kind.value_type)
    )


def _lengths(lists: pa.Array) -> np.ndarray:
    """Items in each list; 0 for null."""
    return np.asarray(lists.value_lengths().fill_null(0).to_numpy(), dtype=np.int64)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each of them begins, and the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _align(lists: pa.Array, lengths: np.ndarray) -> np.ndarray:
    """The lists one behind another, each cut or filled up to its length: a missing or short one doesn't shift the rest."""
    dtype, fill = FILL[lists.type.value_type]
    values = lists.flatten().cast(pa.float64()).fill_null(fill).to_numpy()
    own = _lengths(lists)
    aligned = np.full(lengths.sum(), fill, dtype)
    for start, source, count in zip(_starts(lengths), _starts(own), np.minimum(own, lengths), strict=False):
        aligned[start : start + count] = values[source : source + count]
    return aligned


def _shrink(data: bytes, most: int, across: int) -> tuple[bytes, str, tuple[int, int]]:
    """Bytes to show (a thumbnail `across` pixels wide if there are more than `most`), their format and the original's pixels
    (width, height)."""
    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        size = image.size
        if len(data) <= most and max(size) <= max(across, 2048):
            assert image.format is not None  # one of those above
            return data, image.format, size
        image.thumbnail((across, across))
        shown = io.BytesIO()
        image.convert("RGBA" if "A" in image.getbands() else "RGB").save(shown, "WEBP", quality=80)
        return shown.getvalue(), "WEBP", size
