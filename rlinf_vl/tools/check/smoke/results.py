"""The results of a smoke run: a line for each stage, JSON, and the verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: ok; failed; skipped: a stage that it needs has failed; unreached: the time was up.
State = Literal["ok", "failed", "skipped", "unreached"]
WIDTHS = (10, 9, 7, 6, 9)


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of one stage.

    Attributes:
        gib: the largest memory while it lasted: of the fullest GPU, on CPUs of all processes.
        preflight_gib: what the ledger of `preflight` says of the same phase; None: nothing.
        text: what was found, or why it failed.
        hint: what to do about a failure.
    """

    name: str
    state: State
    seconds: float = 0.0
    gib: float | None = None
    preflight_gib: float | None = None
    text: str = ""
    hint: str = ""

    def row(self) -> str:
        """Return the stage's row of the table."""
        cells = (
            self.name,
            self.state,
            f"{self.seconds:.1f}" if self.state in ("ok", "failed") else "",
            "" if self.gib is None else f"{self.gib:.2f}",
            "" if self.preflight_gib is None else f"{self.preflight_gib:.2f}",
        )
        text = "; ".join(filter(None, (" ".join(self.text.split()), self.hint)))
        return table_row((*cells, text.replace("|", "\\|")))


def table_row(cells: Sequence[str]) -> str:
    """Return a row of the Markdown table."""
    aligned = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)]
    return f"| {' | '.join((*aligned, *cells[len(WIDTHS) :]))} |"


def header() -> str:
    """Return the head of the table."""
    rule = tuple("-" * width for width in WIDTHS)
    return "\n".join(
        (
            table_row(("stage", "state", "seconds", "GiB", "preflight", "found")),
            table_row((*rule, "-----")),
        )
    )


def verdict(results: Sequence[StageResult], seconds: float, limit: float) -> str:
    """Return one line on all stages: the first that failed, with its reason."""
    failed = [result for result in results if result.state == "failed"]
    unreached = [result.name for result in results if result.state == "unreached"]
    if failed:
        first = failed[0]
        also_failed = (
            f" (failed, too: {', '.join(r.name for r in failed[1:])})" if failed[1:] else ""
        )
        reason = " ".join(first.text.split())
        return f"smoke: FAILED in {first.name}: {reason}{also_failed}"
    if unreached:
        return (
            f"smoke: NOT FINISHED within {limit:g} s: {', '.join(unreached)} not reached; what was "
            "reached is sound. Give it more time with --limit SECONDS"
        )
    return f"smoke: ok, all {len(results)} stages in {seconds:.0f} s"


def as_json(
    results: Sequence[StageResult], passed: bool, line: str, **facts: Any
) -> dict[str, Any]:
    """Return the content of `--json FILE`."""
    stages = [asdict(result) for result in results]
    return {**facts, "passed": passed, "verdict": line, "stages": stages}
