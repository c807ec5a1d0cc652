"""The problems of a run: rows of one or several sources, converted on access."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from rlinf_vl.config.schema.data import DataConfig
from rlinf_vl.data.clips import is_clip
from rlinf_vl.data.damage import check_pixels
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.rows import at_path, row_to_problem
from rlinf_vl.data.sources import Source, open_source
from rlinf_vl.data.unusable import BadRow, RowError, kind_and_reason
from rlinf_vl.data.vision_controls import ImageFacts
from rlinf_vl.types import Problem

_DEFAULT = RowFormat()


class RowFacts(NamedTuple):
    """The facts about a usable row that the controller needs."""

    source: int = 0  # index of its entry in data.train_data_paths
    level: float = 0.0  # its value in the column data.curriculum_key
    dropped_images: int = 0  # the number of its images beyond the limits
    images: tuple[ImageFacts, ...] = ()  # of a validation row
    #: Keys of its messages, and columns, that are neither used nor passed on.
    unused_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FilterResult:
    """The rows of a data set, sorted by usability; all mappings are by row number."""

    kept: dict[int, str] = field(default_factory=dict)  # usable rows → answer
    too_long: dict[int, int] = field(default_factory=dict)  # rows → tokens of the prompt
    bad: dict[int, BadRow] = field(default_factory=dict)
    #: Usable rows whose prompt is cut → its tokens before the cut, and the images that it loses.
    cut: dict[int, tuple[int, int]] = field(default_factory=dict)
    facts: dict[int, RowFacts] = field(default_factory=dict)  # of usable rows
    text_only: dict[int, str] = field(default_factory=dict)  # rows left out without an image → id

    @property
    def unused_keys(self) -> dict[str, int]:
        """Return the keys that are neither used nor passed on → the usable rows that have them."""
        return dict(Counter(name for facts in self.facts.values() for name in facts.unused_keys))

    @classmethod
    def merged(cls, results: Sequence["FilterResult"]) -> "FilterResult":
        """Merge the results of disjoint sets of rows, and sort them by row."""
        merged: dict[str, dict[int, Any]] = {}
        for name in cls.__slots__:
            rows: dict[int, Any] = {}
            for result in results:
                rows.update(getattr(result, name))
            merged[name] = dict(sorted(rows.items(), key=itemgetter(0)))
        return cls(**merged)


class ProblemDataset:
    """A sequence of `Problem`s, one per row of its sources."""

    def __init__(self, paths: Sequence[str], split: str, form: RowFormat = _DEFAULT) -> None:
        """Open the sources (see `open_source`), one after the other; no row is converted yet.

        Raises:
            ValueError: there is nothing to open, or a source lacks one of the columns.
        """
        if split not in ("train", "val"):
            raise ValueError(f"split: {split!r} is neither 'train' nor 'val'")
        if not paths:
            raise ValueError(f"data.{split}_data_paths: no path given")
        self.split = split
        self._sources: list[Source] = [open_source(str(path), split) for path in paths]
        self._forms = [form.for_columns(source.rows.column_names) for source in self._sources]
        self._columns: list[list[str]] = []
        self._unused_columns: list[tuple[str, ...]] = []
        for source, row_format in zip(self._sources, self._forms, strict=True):
            names = [*row_format.columns, *source.plain_columns(row_format.columns)]
            self._columns.append(names)
            unused = (name for name in source.rows.column_names if name not in names)
            self._unused_columns.append(tuple(f"column {name}" for name in unused))
        self._ends = list(accumulate(len(source.rows) for source in self._sources))
        self._ids: list[str] = []
        self._decodable: set[str] = set()  # hashes of images whose pixels are checked
        stems: set[str] = set()
        for source, row_format in zip(self._sources, self._forms, strict=True):
            if missing := row_format.missing_column(source.rows.column_names, source.name):
                raise ValueError(missing)
            names = (f"{source.stem}-{n}" if n > 1 else source.stem for n in count(1))
            # Several sources may be named alike, say `train`; ids must differ all the same.
            stem = next(name for name in names if name not in stems)
            stems.add(stem)
            self._ids += source.ids(stem)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> Problem:
        """Return the problem of row i.

        Raises:
            RowError: the row can't become a problem.
            IndexError: there is no such row; a negative i is none.
        """
        return self.problem(i)

    def problem(self, i: int, draw: int = 0) -> Problem:
        """Return the problem of row i with its question in one of data.prompt_variants.

        `draw` is any number from 0 on; modulo the number of variants, it selects the variant.
        """
        row, k = self.raw(i), self.source_of(i)
        form, root = self._forms[k], self._sources[k].root
        return row_to_problem(
            row, self._ids[i], form, root, draw % max(1, len(form.prompt_variants))
        )

    def raw(self, i: int) -> dict[str, Any]:
        """Return the columns of row i as they are stored.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        k = self.source_of(i)
        return self._sources[k].row(
            i - self._ends[k] + len(self._sources[k].rows), self._columns[k]
        )

    def small_columns(self, max_values: int) -> Iterator[np.ndarray]:
        """Yield the columns of 2 to `max_values` different values, as a number for each row."""
        names = dict.fromkeys(name for columns in self._columns for name in columns)
        for name in names:
            sources = [source.value_numbers(name, max_values) for source in self._sources]
            numbers = [n for n in sources if n is not None]
            # Numbers of different sources are of different values.
            ends = accumulate((int(n.max(initial=0)) + 1 for n in numbers), initial=0)
            if len(numbers) == len(sources):
                column = np.concatenate([n + end for n, end in zip(numbers, ends, strict=False)])
                if len(column) and column.min() != column.max():
                    yield column

    def source_of(self, i: int) -> int:
        """Return the index of the source of row i."""
        return bisect_right(self._ends, i)

    def row_id(self, i: int) -> str:
        """Return the `Problem.id` of a row, which may be a bad one."""
        return self._ids[i]

    def filter_by_length(
        self,
        rows: Sequence[int],
        count_tokens: Callable[[int, Problem], int],
        max_tokens: int,
        *,
        image_only: bool = False,
        level_key: str | None = None,
    ) -> FilterResult:
        """Sort rows by whether they can be used and their prompt has at most `max_tokens` tokens.

        The longest of a prompt's variants counts. The pixels of every image of a prompt that fits
        are checked once, since the header of a truncated file is intact. No row raises an error:
        one that can't be read, counted or decoded is in `FilterResult.bad`.

        Args:
            rows: the rows to sort.
            count_tokens: returns the number of tokens of a prompt, given (row, problem).
            max_tokens: the maximum number of tokens of a prompt.
            image_only: data.image_only_mode.
            level_key: data.curriculum_key, by which training rows are sorted.
        """
        result = FilterResult()
        for i in rows:
            try:
                k = self.source_of(i)
                problem = self[i]
                if image_only and not problem.images:
                    result.text_only[i] = problem.id
                    continue
                level = _level(problem, level_key if self.split == "train" else None)
                variants = (
                    self.problem(i, draw) for draw in range(1, len(self._forms[k].prompt_variants))
                )
                tokens = max(count_tokens(i, variant) for variant in (problem, *variants))
                if tokens > max_tokens:
                    result.too_long[i] = tokens
                    continue
                for image in problem.images:
                    # A clip's frames were encoded by this process.
                    if image.hash not in self._decodable:
                        if not is_clip(image):
                            check_pixels(image)
                        self._decodable.add(image.hash)
                result.kept[i] = problem.answer
                images: tuple[ImageFacts, ...] = ()
                if self.split == "val":
                    images = tuple(map(ImageFacts.of, problem.images))
                unused_keys = (*self._unused_columns[k], *problem.unused_keys)
                result.facts[i] = RowFacts(k, level, problem.dropped_images, images, unused_keys)
            # Readers, chat templates and tokenizers raise errors of many types.
            except Exception as e:
                kind, reason = kind_and_reason(e)
                result.bad[i] = BadRow(kind, self._ids[i], reason)
        return result


def _level(problem: Problem, key: str | None) -> float:
    """Return the number by which a curriculum sorts the row; 0 without a curriculum.

    Raises:
        RowError: the column does not hold a finite number.
    """
    if key is None:
        return 0.0
    value = at_path(problem.columns, key)
    try:
        number = float(value)
        if math.isfinite(number):
            return number
    except (TypeError, ValueError):
        pass
    raise RowError(
        problem.id,
        "curriculum unusable",
        f"data.curriculum_key: column {key!r} holds {value!r}, not a number",
    )


def open_datasets(data: DataConfig, environments: Collection[str]) -> dict[str, ProblemDataset]:
    """Open the data sets of a config: split ("train", "val" if it has paths) → its rows.

    Args:
        data: the config's `data` section.
        environments: see `RowFormat`.

    Raises:
        ValueError: see `ProblemDataset`.
    """
    form = RowFormat.of(data, environments)
    paths = {"train": data.train_data_paths, "val": data.val_data_paths}
    return {
        split: ProblemDataset(entries, split, form) for split, entries in paths.items() if entries
    }
