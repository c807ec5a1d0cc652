"""Trajectories and their images for the report: a selection of them, and their columns as arrays
that a browser reads.

Text is a table of distinct strings and an index into it. Values per token are one array over all
trajectories, and one array of offsets cuts them all. Of an image's placeholders, hundreds of the
same, only the first one is there. Nothing outside the run's folder is read, whatever an image's
path says.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vl.observe.clip_files import frames_of
from rlinf_vl.observe.trajectories import SCHEMA
from rlinf_vl.tools.report.look_files import KEY as LOOK_KEY
from rlinf_vl.tools.report.look_files import SCHEMA as LOOK_SCHEMA
from rlinf_vl.tools.report.look_files import WITH_BLANKS, WITH_IMAGES, look_file

#: Column type → the type of the column in the browser, and the value of a token that has none.
FILL = {pa.float32(): (np.float32, np.nan), pa.int32(): (np.int32, -1), pa.bool_(): (np.uint8, 1)}
#: Bytes of a trajectory in the report before compression, images and tokens aside, and bytes of
#: each of its tokens.
BYTES_PER_TRAJECTORY, BYTES_PER_TOKEN = 1000, 20


class _SizeLimit(NamedTuple):
    """The largest image that is kept as it is, up to a used share of the images' room."""

    used_share: float
    bytes: int
    side: int  # pixels


#: The fuller the images' room, the smaller an image is made. Most reports have one image at full
#: size; a report of many shows all of them small rather than a few.
_SIZE_LIMITS = [
    _SizeLimit(0.5, 1_000_000, 2048),
    _SizeLimit(0.75, 100_000, 1024),
    _SizeLimit(1.0, 10_000, 256),
]
#: Formats that every browser shows; Pillow is asked for no other.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class _Group(NamedTuple):
    """A group of trajectories in a file."""

    file: Path
    split: str
    rows: list[int]
    bytes: int  # in the report


def add_section(sections: bytearray, data: np.ndarray) -> dict[str, Any]:
    """Append an array, and return a reference to it, {"type", "at", "count"}, `at` in bytes."""
    sections += bytes(-len(sections) % 4)  # a browser's arrays are aligned
    reference = {"type": data.dtype.str[1:], "at": len(sections), "count": len(data)}
    sections += data.tobytes()
    return reference


def read_image(run: Path, name: str) -> bytes:
    """Return the encoded image at this path in the run's folder.

    Raises:
        ValueError: with the reason for a reader why it is left out.
    """
    file = (run / name).resolve()
    if not file.is_relative_to(run.resolve()):
        raise ValueError("outside the run's folder")
    if not file.is_file():  # reading a pipe would wait
        raise ValueError("missing")
    return file.read_bytes()


class ImageStore:
    """Images of all runs, each distinct file's bytes once, up to `max_bytes` in total.

    Attributes:
        images: {"data", "type", "size"} of a picture; {"clip": [[index of a frame's picture,
            seconds], …]} of a video.
    """

    def __init__(self, sections: bytearray, max_bytes: int) -> None:
        self._sections = sections
        self._max_bytes = max_bytes
        self._bytes = 0
        self._index_of_digest: dict[bytes, int] = {}
        self.images: list[dict[str, Any]] = []

    def add(self, run: Path, name: str) -> int:
        """Add an image, unless its bytes are there, and return its index.

        Raises:
            ValueError: with the reason for a reader why it is left out.
        """
        data = read_image(run, name)
        frames = _clip_frames(data)
        if not frames:
            return self._add_picture(data)
        digest = hashlib.sha256(data).digest()
        if digest not in self._index_of_digest:
            clip = [[self._add_picture(frame), seconds] for frame, seconds in frames]
            self._index_of_digest[digest] = len(self.images)
            self.images.append({"clip": clip})
        return self._index_of_digest[digest]

    def _add_picture(self, data: bytes) -> int:
        """Add an encoded picture, unless its bytes are there, and return its index."""
        digest = hashlib.sha256(data).digest()
        if digest not in self._index_of_digest:
            try:
                used = self._bytes / self._max_bytes
                limit = next(
                    (limit for limit in _SIZE_LIMITS if used <= limit.used_share), _SIZE_LIMITS[-1]
                )
                encoded, kind, size = _shrink(data, limit.bytes, limit.side)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise ValueError("not an image that can be shown") from error
            if self._bytes + len(encoded) > self._max_bytes:
                raise ValueError(f"there is room for {self._max_bytes:,} bytes only")
            self._bytes += len(encoded)
            self._index_of_digest[digest] = len(self.images)
            reference = add_section(self._sections, np.frombuffer(encoded, np.uint8))
            self.images.append({"data": reference, "type": f"image/{kind.lower()}", "size": size})
        return self._index_of_digest[digest]


def read_trajectories(run: Path, max_bytes: int, notes: list[str]) -> pa.Table:
    """Return the trajectories of a run in the order of steps, as many as fit, with all columns of
    `SCHEMA` and further ones per token.

    Whole groups are chosen, evenly over the steps: first of validation, up to three quarters of the
    bytes, then of training.
    """
    groups = []
    for file in sorted(
        run.glob("trajectories/step_*.parquet"), key=lambda f: (len(f.name), f.name)
    ):
        groups += _groups_of(
            file, _read(file, notes, ("split", "group_id", "response_mask", "response_ids"))
        )
    if not groups:
        notes.append("No trajectories are stored.")
    rows_of: dict[Path, list[int]] = {}
    for split in ("validation", "training"):
        candidates = [g for g in groups if (g.split == "val") == (split == "validation")]
        share = 0.75 if split == "validation" and len(candidates) < len(groups) else 1
        chosen = _choose(candidates, int(max_bytes * share))
        max_bytes -= sum(g.bytes for g in chosen)
        kept_rows = sum(len(g.rows) for g in chosen)
        total = sum(len(g.rows) for g in candidates)
        if kept_rows < total:
            notes.append(
                f"{total - kept_rows:,} of {total:,} {split} trajectories left out, evenly over "
                "the steps."
            )
        for group in chosen:
            rows_of.setdefault(group.file, []).extend(group.rows)
    tables = [SCHEMA.empty_table()]
    for file in dict.fromkeys(group.file for group in groups if group.file in rows_of):
        table = _read(file, notes)
        if len(table):  # empty if a column that was not read before is broken
            table = table.take(sorted(rows_of[file]))
            tables.append(_with_look(table, run, int(file.stem.removeprefix("step_")), notes))
    return pa.concat_tables(tables, promote_options="default")


def _with_look(table: pa.Table, run: Path, step: int, notes: list[str]) -> pa.Table:
    """Add the columns of a step's `look_file` to its trajectories, if it has one."""
    file = look_file(run, step)
    if not file.is_file():
        return table
    try:
        rows = pq.read_table(file, schema=LOOK_SCHEMA).to_pylist()
    except (pa.ArrowException, OSError, ValueError):
        notes.append(f"look/{file.name} could not be read and is left out.")
        return table
    by_key = {(row["split"], row["group_id"], row["sample"]): row for row in rows}
    keys = zip(*(table[name].to_pylist() for name in LOOK_KEY), strict=True)
    look_rows = [by_key.get(key, {}) for key in keys]
    for name in (WITH_IMAGES, WITH_BLANKS, "heat_maps"):
        values = [row.get(name) for row in look_rows]
        table = table.append_column(name, pa.array(values, LOOK_SCHEMA.field(name).type))
    return table


def encode_trajectories(
    table: pa.Table, run: Path, sections: bytearray, images: ImageStore, notes: list[str]
) -> dict:
    """Append the columns of trajectories to `sections`.

    Returns:
        Column name → reference into `sections`, or {"table": distinct texts, "index": reference}.
        Columns that `SCHEMA` doesn't name are the pairs (name, reference) of "token_columns".
    """
    columns: dict[str, Any] = {"count": len(table), "token_columns": []}
    lengths = _lengths(table["tokens"].combine_chunks())
    kept_tokens = _kept_tokens(table, lengths)
    columns["offsets"] = add_section(
        sections, _starts(kept_tokens)[_starts(lengths)].astype(np.int32)
    )
    table = _shift_turns(table, lengths, kept_tokens)
    for name in table.column_names:
        if name in ("images", "prompt_ids"):
            continue
        column = table[name].combine_chunks()
        if column.type == pa.string() or name == "tokens":
            texts = (
                column.flatten().filter(pa.array(kept_tokens)) if name == "tokens" else column
            ).dictionary_encode()
            index = texts.indices.fill_null(-1).to_numpy().astype(np.int32)
            columns[name] = {
                "table": texts.dictionary.to_pylist(),
                "index": add_section(sections, index),
            }
        elif not pa.types.is_list(column.type):
            fill = 0 if pa.types.is_integer(column.type) else np.nan
            columns[name] = add_section(
                sections, column.cast(pa.float32()).fill_null(fill).to_numpy()
            )
        elif name in SCHEMA.names:
            columns[name] = add_section(sections, _align(column, lengths)[kept_tokens])
        else:
            columns["token_columns"].append(
                (name, add_section(sections, _align(column, lengths)[kept_tokens]))
            )
    image_lists = table["images"].combine_chunks()
    columns["image_offsets"] = add_section(
        sections, _starts(_lengths(image_lists)).astype(np.int32)
    )
    paths = image_lists.flatten().dictionary_encode()
    names = paths.dictionary.to_pylist()
    name_indices = paths.indices.fill_null(-1).to_numpy()
    # One item more than names: an index of -1, an image without a name, reads the last one.
    image_indices = np.full(len(names) + 1, -1, np.int32)
    last_use = np.zeros(len(names) + 1, np.int64)
    reasons = Counter()
    last_use[name_indices] = np.arange(len(name_indices))
    for k in np.argsort(-last_use[:-1]):  # the newest images first, should there be no room for all
        try:
            image_indices[k] = images.add(run, names[k])
        except (ValueError, OSError) as error:
            reasons[getattr(error, "strerror", None) or str(error)] += 1
    notes += [
        f"{count} image{'s' if count > 1 else ''} left out: {reason}."
        for reason, count in reasons.items()
    ]
    return columns | {"images": add_section(sections, image_indices[name_indices])}


def _groups_of(file: Path, index: pa.Table) -> list[_Group]:
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(
        zip(index["split"].to_pylist(), index["group_id"].to_pylist(), strict=True)
    ):
        rows_of.setdefault(key, []).append(row)
    lengths = _lengths(index["response_mask"].combine_chunks())
    ends = _starts(_kept_tokens(index, lengths))[_starts(lengths)]
    sizes = BYTES_PER_TRAJECTORY + BYTES_PER_TOKEN * np.diff(ends)
    return [
        _Group(file, split, rows, int(sizes[rows].sum())) for (split, _), rows in rows_of.items()
    ]


def _kept_tokens(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens of all trajectories that are in the report.

    A token is left out if it was not sampled and repeats the one before, as an image's placeholders
    do.
    """
    ids = _align(table["response_ids"].combine_chunks(), lengths)
    mask = _align(table["response_mask"].combine_chunks(), lengths)
    repeats = (
        (ids[1:] == ids[:-1]) & (ids[1:] >= 0) & ~mask[1:].astype(bool) & ~mask[:-1].astype(bool)
    )
    kept_tokens = np.concatenate([np.ones(min(1, len(ids)), bool), ~repeats])
    starts = _starts(lengths)
    # The token before a trajectory's first one is another trajectory's. Empty ones at the end start
    # behind the last token.
    kept_tokens[starts[starts < len(kept_tokens)]] = True
    return kept_tokens


def _shift_turns(table: pa.Table, lengths: np.ndarray, kept_tokens: np.ndarray) -> pa.Table:
    """Turn the positions in "turns" into positions among the kept tokens."""
    layouts = table["turns"].to_pylist()
    counts = _starts(kept_tokens)  # kept tokens before each token
    starts = _starts(lengths)
    for row, text in enumerate(layouts):
        positions = counts[starts[row] : starts[row + 1] + 1] - counts[starts[row]]
        try:
            layout = json.loads(text or "{}")
            turns = layout.get("turns", ())
            if positions[-1] < lengths[row]:  # else every token is kept
                layout["sequences"] = [int(positions[start]) for start in layout["sequences"]]
                layout["turns"] = [_shifted(turn, positions) for turn in turns]
                layouts[row] = json.dumps(layout)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue  # the page shows such a trajectory as one text
    return table.set_column(
        table.column_names.index("turns"), "turns", pa.array(layouts, pa.string())
    )


def _shifted(turn: dict[str, Any], positions: np.ndarray) -> dict[str, Any]:
    """Return a turn with its positions replaced by `positions` at them."""
    return turn | {
        key: int(positions[turn[key]]) for key in ("start", "end", "thought") if key in turn
    }


def _choose(groups: Sequence[_Group], max_bytes: int) -> list[_Group]:
    """Return all groups if they fit, else evenly spaced ones."""
    total = sum(g.bytes for g in groups)
    if total <= max_bytes:
        return list(groups)
    chosen = [
        groups[int(i)]
        for i in np.linspace(0, len(groups) - 1, len(groups) * max_bytes // total).round()
    ]
    # Groups differ in size. Dropping from the middle leaves the first and the last steps.
    while sum(g.bytes for g in chosen) > max_bytes:
        chosen.pop(len(chosen) // 2)
    return chosen


def _read(file: Path, notes: list[str], names: Sequence[str] = ()) -> pa.Table:
    """Return columns of `SCHEMA` by name, null where the file has none; a broken file has no rows,
    and a note.

    Without names all of them, and further columns that have a number per token, as float32.
    """
    # The page shows prompts as text.
    page_names = [name for name in SCHEMA.names if name != "prompt_ids"]
    fields = [SCHEMA.field(name) for name in names or page_names]
    try:
        with pq.ParquetFile(file) as parquet:
            column_types = {field.name: field.type for field in parquet.schema_arrow}
            token_columns = [
                name
                for name, kind in column_types.items()
                if name not in SCHEMA.names and _is_numbers(kind)
            ]
            fields += [
                pa.field(name, pa.list_(pa.float32())) for name in (() if names else token_columns)
            ]
            table = parquet.read(
                columns=[field.name for field in fields if field.name in column_types]
            )
            count = parquet.metadata.num_rows
        columns = [
            table[f.name].cast(f.type) if f.name in column_types else pa.nulls(count, f.type)
            for f in fields
        ]
        table = pa.table(columns, schema=pa.schema(fields))
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, ValueError):
        notes.append(f"{file.parent.name}/{file.name} could not be read and is left out.")
        return pa.schema(fields).empty_table()


def _is_numbers(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind)
        and pa.types.is_primitive(kind.value_type)
        and not pa.types.is_temporal(kind.value_type)
    )


def _lengths(lists: pa.Array) -> np.ndarray:
    """Return the number of items in each list; 0 for null."""
    return np.asarray(lists.value_lengths().fill_null(0).to_numpy(), dtype=np.int64)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the position at which each item begins, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _align(lists: pa.Array, lengths: np.ndarray) -> np.ndarray:
    """Join the lists, each cut or filled up to its length.

    So a missing or a short list doesn't shift the rest.
    """
    dtype, fill = FILL[lists.type.value_type]
    values = lists.flatten().cast(pa.float64()).fill_null(fill).to_numpy()
    list_lengths = _lengths(lists)
    aligned = np.full(lengths.sum(), fill, dtype)
    for start, source, count in zip(
        _starts(lengths), _starts(list_lengths), np.minimum(list_lengths, lengths), strict=False
    ):
        aligned[start : start + count] = values[source : source + count]
    return aligned


def _clip_frames(data: bytes) -> list[tuple[bytes, float]]:
    """Return the encoded frames of a clip's file and their seconds; [] for any other file."""
    frames = []
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            for picture, seconds in frames_of(image):
                file = io.BytesIO()
                picture.save(file, "PNG")
                frames.append((file.getvalue(), seconds))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return []
    return frames


def _shrink(data: bytes, max_bytes: int, max_side: int) -> tuple[bytes, str, tuple[int, int]]:
    """Return the bytes to show, their format and the original's size in pixels (width, height).

    An image of more than `max_bytes` becomes a thumbnail of at most `max_side` pixels.
    """
    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        size = image.size
        if len(data) <= max_bytes and max(size) <= max(max_side, 2048):
            assert image.format is not None  # one of IMAGE_FORMATS
            return data, image.format, size
        image.thumbnail((max_side, max_side))
        buffer = io.BytesIO()
        image.convert("RGBA" if "A" in image.getbands() else "RGB").save(buffer, "WEBP", quality=80)
        return buffer.getvalue(), "WEBP", size
