"""The problems of a run: rows of one or several sources, converted one at a time when asked for."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from rlinf_vl.data.damage import check_pixels
from rlinf_vl.data.rows import RowFormat, row_to_problem
from rlinf_vl.data.sources import Source, open_source
from rlinf_vl.data.unusable import BadRow, kind_and_reason
from rlinf_vl.data.videos import COLUMNS as VIDEO_COLUMNS
from rlinf_vl.types import Problem

_DEFAULT = RowFormat()


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Rows that can be used, with their answers; those with too long a prompt, with its tokens; bad ones; and of those that can be
    used those whose prompt is cut, with its tokens before and the images that it loses."""

    kept: dict[int, str] = field(default_factory=dict)
    too_long: dict[int, int] = field(default_factory=dict)
    bad: dict[int, BadRow] = field(default_factory=dict)
    cut: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def merged(cls, results: Sequence["FilterResult"]) -> "FilterResult":
        """The results of disjoint sets of rows as one, rows in order."""
        kept = sorted(item for result in results for item in result.kept.items())
        too_long = sorted(item for result in results for item in result.too_long.items())
        bad = sorted((item for result in results for item in result.bad.items()), key=lambda item: item[0])
        cut = sorted(item for result in results for item in result.cut.items())
        return cls(dict(kept), dict(too_long), dict(bad), dict(cut))


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
        self._form = form
        self._sources: list[Source] = [open_source(str(path), split) for path in paths]
        self._further = [
            source.plain_columns((*form.columns, *VIDEO_COLUMNS))
            + [name for name in VIDEO_COLUMNS if name in source.rows.column_names and name not in form.columns]
            for source in self._sources
        ]
        self._ends = list(accumulate(len(source.rows) for source in self._sources))
        self._ids: list[str] = []
        self._decodable: set[str] = set()  # hashes of images that were decoded before
        stems: set[str] = set()
        for source in self._sources:
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
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        k = bisect_right(self._ends, i)
        source = self._sources[k]
        row = source.row(i - self._ends[k] + len(source.rows), [*self._form.columns, *self._further[k]])
        return row_to_problem(row, self._ids[i], self._form, source.root)

    def row_id(self, i: int) -> str:
        """`Problem.id` of a row, which may be bad."""
        return self._ids[i]

    def filter_by_length(
        self, rows: Sequence[int], count_tokens: Callable[[int, Problem], int], max_tokens: int
    ) -> FilterResult:
        """Sort rows by whether their prompt has at most `max_tokens` tokens, as `count_tokens(row, problem)` counts them.

        The pixels of every image of those that fit are looked at once, as a header doesn't tell that a file is truncated.
        No row raises: one that can't be read, counted or decoded is in `bad`.
        """
        result = FilterResult()
        for i in rows:
            try:
                problem = self[i]
                if (tokens := count_tokens(i, problem)) > max_tokens:
                    result.too_long[i] = tokens
                    continue
                for image in problem.images:
                    if image.hash not in self._decodable:
                        check_pixels(image)
                        self._decodable.add(image.hash)
                result.kept[i] = problem.answer
            except Exception as e:  # RowError, ImageError, and whatever a reader, a chat template or a tokenizer raises
                kind, reason = kind_and_reason(e)
                result.bad[i] = BadRow(kind, self._ids[i], reason)
        return result
