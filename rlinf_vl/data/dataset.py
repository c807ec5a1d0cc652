"""The problems of a run: rows of one or several sources, converted one at a time when asked for."""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import itemgetter
from typing import Any, NamedTuple

from rlinf_vl.config.schema.data import DataConfig
from rlinf_vl.data.damage import check_pixels
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.rows import at_path, row_to_problem
from rlinf_vl.data.sources import Source, open_source
from rlinf_vl.data.unusable import BadRow, RowError, kind_and_reason
from rlinf_vl.data.videos import COLUMNS as VIDEO_COLUMNS
from rlinf_vl.types import Problem

_DEFAULT = RowFormat()


class RowFacts(NamedTuple):
    """Of a row that can be used: which of data.train_data_paths it is from, its value in the column of data.curriculum_key, and how
    many of its images are beyond the limits."""

    source: int = 0
    level: float = 0.0
    dropped_images: int = 0


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Rows that can be used, with their answers; those with too long a prompt, with its tokens; bad ones; of those that can be used
    those whose prompt is cut, with its tokens before and the images that it loses; what is known of each that can be used; and
    those left out for they have no image, with their ids."""

    kept: dict[int, str] = field(default_factory=dict)
    too_long: dict[int, int] = field(default_factory=dict)
    bad: dict[int, BadRow] = field(default_factory=dict)
    cut: dict[int, tuple[int, int]] = field(default_factory=dict)
    facts: dict[int, RowFacts] = field(default_factory=dict)
    text_only: dict[int, str] = field(default_factory=dict)

    @classmethod
    def merged(cls, results: Sequence["FilterResult"]) -> "FilterResult":
        """The results of disjoint sets of rows as one, rows in order."""
        together = {
            name: {k: v for result in results for k, v in getattr(result, name).items()} for name in cls.__slots__
        }
        return cls(**{name: dict(sorted(rows.items(), key=itemgetter(0))) for name, rows in together.items()})


class ProblemDataset:
    """`len(dataset)` rows; `dataset[i]` is a `Problem`."""

    def __init__(self, paths: Sequence[str], split: str, form: RowFormat = _DEFAULT) -> None:
        """Open the sources (see `open_source`) one after the other; no row is converted yet.

        Raises:
            ValueError: nothing to open, or a source lacks one of the columns.
        """
        if split not in ("train", "val"):
            raise ValueError(f"split: {split!r} is neither 'train' nor 'val'")
        if not paths:
            raise ValueError(f"data.{split}_data_paths: no path given")
        self.split = split
        self._sources: list[Source] = [open_source(str(path), split) for path in paths]
        self._forms = [form.for_columns(source.rows.column_names) for source in self._sources]
        self._columns = [
            [*form.columns, *source.plain_columns((*form.columns, *VIDEO_COLUMNS))]
            + [name for name in VIDEO_COLUMNS if name in source.rows.column_names and name not in form.columns]
            for source, form in zip(self._sources, self._forms, strict=True)
        ]
        self._ends = list(accumulate(len(source.rows) for source in self._sources))
        self._ids: list[str] = []
        self._decodable: set[str] = set()  # hashes of images that were decoded before
        stems: set[str] = set()
        for source, form in zip(self._sources, self._forms, strict=True):
            if missing := form.missing_column(source.rows.column_names, source.name):
                raise ValueError(missing)
            names = (f"{source.stem}-{n}" if n > 1 else source.stem for n in count(1))
            stem = next(name for name in names if name not in stems)  # several may be called `train`
            stems.add(stem)
            self._ids += source.ids(stem)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> Problem:
        """The problem of row i. Raises RowError: it can't become one; IndexError: no such row, which a negative i is, too."""
        return self.problem(i)

    def problem(self, i: int, draw: int = 0) -> Problem:
        """`self[i]` with its question in the text that this draw, any number from 0, stands for among data.prompt_variants."""
        row, k = self.raw(i), self.source_of(i)
        form, root = self._forms[k], self._sources[k].root
        return row_to_problem(row, self._ids[i], form, root, draw % max(1, len(form.prompt_variants)))

    def raw(self, i: int) -> dict[str, Any]:
        """The columns of row i as they are stored. Raises IndexError: no such row."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        k = self.source_of(i)
        return self._sources[k].row(i - self._ends[k] + len(self._sources[k].rows), self._columns[k])

    def source_of(self, i: int) -> int:
        """Which of the sources row i is from."""
        return bisect_right(self._ends, i)

    def row_id(self, i: int) -> str:
        """`Problem.id` of a row, which may be bad."""
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
        """Sort rows by whether their prompt, the longest of its variants, has at most `max_tokens` tokens, as
        `count_tokens(row, problem)` counts them.

        The pixels of every image of those that fit are looked at once, as a header doesn't tell that a file is truncated.
        No row raises: one that can't be read, counted or decoded is in `bad`.

        Args:
            image_only: data.image_only_mode.
            level_key: data.curriculum_key, which orders training rows.
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
                others = (self.problem(i, draw) for draw in range(1, len(self._forms[k].prompt_variants)))
                tokens = max(count_tokens(i, shown) for shown in (problem, *others))
                if tokens > max_tokens:
                    result.too_long[i] = tokens
                    continue
                for image in problem.images:
                    if image.hash not in self._decodable:
                        check_pixels(image)
                        self._decodable.add(image.hash)
                result.kept[i] = problem.answer
                result.facts[i] = RowFacts(k, level, problem.dropped_images)
            except Exception as e:  # RowError, ImageError, and whatever a reader, a chat template or a tokenizer raises
                kind, reason = kind_and_reason(e)
                result.bad[i] = BadRow(kind, self._ids[i], reason)
        return result


def _level(problem: Problem, key: str | None) -> float:
    """What orders rows in a curriculum. Raises RowError: it is no finite number."""
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
        problem.id, "curriculum unusable", f"data.curriculum_key: column {key!r} holds {value!r}, not a number"
    )


def open_datasets(data: DataConfig, environments: Collection[str]) -> dict[str, ProblemDataset]:
    """Split, "train" and "val" if there is one → its rows; `environments`: of `RowFormat`. Raises ValueError as `ProblemDataset`."""
    form = RowFormat.of(data, environments)
    paths = {"train": data.train_data_paths, "val": data.val_data_paths}
    return {split: ProblemDataset(named, split, form) for split, named in paths.items() if named}
