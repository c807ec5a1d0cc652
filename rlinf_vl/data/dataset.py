"""The problems of a run: rows of one or several sources, converted one at a time when asked for."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rlinf_vl.data.images import decode
from rlinf_vl.data.rows import kind_and_reason, missing_column, row_to_problem, wanted_columns
from rlinf_vl.types import Problem

if TYPE_CHECKING:
    from rlinf_vl.data.sources import Source


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be used: the kind of reason that it is counted under, its id, and the reason."""

    kind: str
    id: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.id}: {self.kind}: {self.reason}"


@dataclass(slots=True)
class FilterResult:
    """Which rows can be used: `kept`, those with too long a prompt, and unusable ones with the reason. `answers` counts the
    answers of those that are kept; `fewest` and `most` are the tokens of the shortest and the longest prompt that is too long."""

    kept: list[int] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)
    bad: dict[int, BadRow] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    fewest: int | None = None
    most: int | None = None

    @classmethod
    def merged(cls, results: Sequence["FilterResult"]) -> "FilterResult":
        """The results of disjoint sets of rows as one, rows in order."""
        tokens = [n for result in results for n in (result.fewest, result.most) if n is not None]
        return cls(
            kept=sorted(row for result in results for row in result.kept),
            too_long=sorted(row for result in results for row in result.too_long),
            bad={row: why for result in results for row, why in result.bad.items()},
            answers=sum((result.answers for result in results), Counter()),
            fewest=min(tokens, default=None),
            most=max(tokens, default=None),
        )


class ProblemDataset:
    """`len(dataset)` rows; `dataset[i]` is a `Problem` or raises `RowError`. Made by `open`."""

    def __init__(self, sources: Sequence["Source"], row_format: dict[str, Any], columns: list[str]) -> None:
        self._sources = list(sources)
        self._format, self._columns = row_format, columns
        self._ids = [id for source in sources for id in source.ids()]
        self._ends = list(accumulate(len(source) for source in sources))
        self._decodable: set[str] = set()  # hashes of images that were decoded before

    @classmethod
    def open(
        cls,
        paths: Sequence[str],
        *,
        split: str,
        prompt_key: str = "problem",
        answer_key: str = "answer",
        image_keys: Sequence[str] = ("images",),
        system_prompt: str | None = None,
        prompt_suffix: str = "",
        blank_images: bool = False,
        image_hosts: Sequence[str] = (),
    ) -> "ProblemDataset":
        """Open sources (see `rlinf_vl.data.sources.open_source`) one after the other; no row is converted yet.

        Args:
            paths: files, folders, hub names or `toy`.
            split: "train" or "val".
            prompt_key, …: as in `rlinf_vl.data.rows.row_to_problem`.

        Raises:
            ValueError: nothing to open, or a source lacks one of the columns.
        """
        from rlinf_vl.data.sources import open_source  # imports `datasets`, which takes a second

        if split not in ("train", "val"):
            raise ValueError(f"split: {split!r} is neither 'train' nor 'val'")
        if not paths:
            raise ValueError(f"data.{split}_data_paths: no path given")
        wanted = wanted_columns(prompt_key, answer_key, image_keys)
        sources: list[Source] = []
        for path in paths:
            source = open_source(str(path), split)
            if missing := missing_column(wanted, source.rows.column_names, source.name):
                raise ValueError(missing)
            sources.append(_with_own_stem(source, {s.stem for s in sources}))
        row_format = {
            "prompt_key": prompt_key,
            "answer_key": answer_key,
            "image_keys": tuple(image_keys),
            "system_prompt": system_prompt,
            "prompt_suffix": prompt_suffix,
            "blank_images": blank_images,
            "image_hosts": tuple(image_hosts),
        }
        return cls(sources, row_format, list(dict.fromkeys(column for _, column in wanted)))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> Problem:
        """The problem of row i, 0 ≤ i < len.

        Raises:
            IndexError: no such row.
            RowError: the row can't become a problem; it names the row and the reason.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        k = bisect_right(self._ends, i)
        source = self._sources[k]
        row = source.row(i - (self._ends[k] - len(source)), self._columns)
        return row_to_problem(row, row_id=self._ids[i], root=source.root, **self._format)

    def row_id(self, i: int) -> str:
        """The id that `Problem.id` is, of a row that may be bad."""
        return self._ids[i]

    def filter_by_length(
        self, rows: Sequence[int], count_tokens: Callable[[int, Problem], int], max_tokens: int
    ) -> FilterResult:
        """Sort rows by whether their prompt is at most `max_tokens` long, as `count_tokens(row, problem)` counts it.

        Every image of those that fit is decoded, once by this dataset, as a header doesn't tell that a file is truncated.
        No row raises here: one that can't be read, counted or decoded is in `bad`.
        """
        result = FilterResult()
        for i in rows:
            try:
                problem = self[i]
                if (tokens := count_tokens(i, problem)) > max_tokens:
                    result.too_long.append(i)
                    result.fewest, result.most = (
                        min(tokens, result.fewest or tokens),
                        max(tokens, result.most or tokens),
                    )
                    continue
                for image in problem.images:
                    if image.hash not in self._decodable:
                        decode(image)
                        self._decodable.add(image.hash)
            except Exception as e:  # RowError, ImageError, and whatever a reader, a chat template or a tokenizer raises
                kind, reason = kind_and_reason(e)
                result.bad[i] = BadRow(kind, self._ids[i], reason)
            else:
                result.kept.append(i)
                result.answers[problem.answer.strip()] += 1
        return result


def _with_own_stem(source: "Source", taken: set[str]) -> "Source":
    """The source, renamed `train-2`, `train-3`… if others are called `train` too: ids stay unique."""
    stem, n = source.stem, 1
    while stem in taken:
        n += 1
        stem = f"{source.stem}-{n}"
    return replace(source, stem=stem)
