"""The findings of a check of users' code: what breaks its contract, in sentences, and remarks."""

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlinf_vl.data.unusable import shorten


@dataclass(kw_only=True)
class Findings:
    """The findings of one check.

    Attributes:
        file: the file of the checked code, to report the lines of its errors; "" if unknown.
        problems: what breaks the contract, by kind: a sentence, and the calls in which it did.
        notes: remarks that are no problems.
    """

    file: str
    problems: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_problem(self, problem: str, where: str = "", kind: str = "") -> None:
        """Record what breaks the contract, once per kind (by default the sentence itself)."""
        self.problems.setdefault(kind or problem, (problem, []))[1].append(where)

    def add_raised(self, subject: str, where: str, error: BaseException) -> None:
        """Record an error that `subject` raised as a problem, once per line that raised it."""
        raised = f"{type(error).__name__}: {shorten(str(error), 200)}{self.line_of(error)}"
        self.add_problem(f"{subject} raised {raised}", where, self._kind(subject, error))

    def has_raised(self, subject: str, error: BaseException) -> bool:
        """Return whether an error of this type and line is among the problems."""
        return self._kind(subject, error) in self.problems

    def _kind(self, subject: str, error: BaseException) -> str:
        return f"{subject} {type(error)}{self.line_of(error)}"

    def line_of(self, error: BaseException) -> str:
        """Return the line of the checked file, or else of any, that raised an error: " (…)"."""
        frames = traceback.extract_tb(error.__traceback__)
        if not frames:
            return ""
        frame = next(
            (frame for frame in reversed(frames) if frame.filename == self.file), frames[-1]
        )
        return f" ({frame.filename}, line {frame.lineno})"

    def problem_lines(self) -> Iterator[str]:
        """Yield a line of the report for each problem."""
        for problem, calls in self.problems.values():
            repeats = f", {len(calls)} times" if len(calls) > 1 else ""
            yield f"BROKEN: {problem}" + (f" [{calls[0]}{repeats}]" if calls[0] + repeats else "")

    def verdict(self, name: str) -> str:
        """Return the last line of the report of the code with this name."""
        if self.problems:
            return f"{name} breaks the contract in {len(self.problems)} ways"
        return f"{name} holds the contract"


def unpaid_lines(rewards: Sequence[float]) -> Iterator[str]:
    """Yield a line of the report if no episode was paid, or all of them the same."""
    if max(rewards) <= 0:
        yield (
            f"NOTHING WAS EVER PAID: none of {len(rewards)} episodes got a reward above 0, neither "
            "with the reference answer nor with what the messages suggest; give answers that must "
            "be paid with --answers"
        )
    elif len(rewards) > 1 and min(rewards) == max(rewards):
        yield (
            f"every episode was paid {max(rewards):g}, whatever the answer: a group of such "
            "rewards teaches nothing"
        )
