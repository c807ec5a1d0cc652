"""The findings of checks: of machines (`doctor`), and of users' code, which holds a contract."""

import json
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from rlinf_vl.data.unusable import shorten
from rlinf_vl.runtime.files import write_aside

#: ok; note: a figure or a remark; warn: worth a look; fail: a run would fail, or a contract is broken.
Status = Literal["ok", "note", "warn", "fail"]
#: What a line on a user's code begins with, by status.
LABELS = {"warn": "LOOK: ", "fail": "BROKEN: "}


class Finding(NamedTuple):
    """A finding about one subject.

    Attributes:
        text: the finding; of a warning or a failure it ends with what to do.
    """

    status: Status
    subject: str
    text: str

    def __str__(self) -> str:
        return LABELS.get(self.status, "") + self.text


def conclude(findings: Sequence[Finding], text: str, file: Path | None, verdict: str = "") -> int:
    """Print the text of findings, write them into a JSON file if one is named, and return the exit
    code: 1 if one of them is a failure, else 0."""
    sys.stdout.write(text)
    passed = all(finding.status != "fail" for finding in findings)
    if file is not None:
        content = {
            "passed": passed,
            "verdict": verdict,
            "findings": [finding._asdict() for finding in findings],
        }
        with write_aside(file, durable=False) as aside:
            # In ASCII: messages of users' code may have lone surrogates, which UTF-8 refuses.
            aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(not passed)


@dataclass(kw_only=True)
class ContractCheck(ABC):
    """The check of one piece of a user's code.

    Attributes:
        name: the code's name, as the user wrote it.
        file: the file of the checked code, to report the lines of its errors; "" if unknown.
        problems: what breaks the contract, by kind: a sentence, and the calls in which it did.
        notes: remarks that are no problems.
    """

    name: str
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

    @abstractmethod
    def figures(self) -> Iterator[str]:
        """Yield the lines on what was seen, warnings and problems aside."""

    def warnings(self) -> Iterator[str]:
        """Yield what is worth a look."""
        yield from ()

    def findings(self) -> list[Finding]:
        """Return a note for each figure, the warnings, and a failure for each kind of problem."""
        texts_by_status: dict[Status, Iterable[str]] = {
            "note": self.figures(),
            "warn": dict.fromkeys(self.warnings()),
            "fail": self._failures(),
        }
        return [
            Finding(status, self.name, text)
            for status, texts in texts_by_status.items()
            for text in texts
        ]

    def _failures(self) -> Iterator[str]:
        for problem, calls in self.problems.values():
            repeats = f", and {len(calls) - 1} more" if len(calls) > 1 else ""
            place = f" [{calls[0]}{repeats}]" if calls[0] + repeats else ""
            yield f"{problem}{place}"

    def verdict(self) -> str:
        """Return the last line of the report."""
        if self.problems:
            return f"{self.name} breaks the contract in {len(self.problems)} ways"
        return f"{self.name} holds the contract"

    def report(self, file: Path | None) -> int:
        """Print the findings and the verdict, as `conclude` does; return the exit code."""
        findings = self.findings()
        lines = [*map(str, findings), self.verdict()]
        return conclude(findings, "\n".join(lines) + "\n", file, self.verdict())


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
