"""Spans: the activities of every process over time, in `spans/<process>.jsonl`, merged into one
timeline; and torch's profiler.

On a GPU a span is the time that its process spends, not the time of the kernels it starts;
`runner.profile.steps` shows those.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlinf_vl.runtime.files import append_lines, read_lines

FOLDER = "spans"
#: Two spans of one name in one thread, with less than this between them, become one.
MERGE_GAP_S = 0.005
#: Spans that have ended are on disk after this time.
FLUSH_S = 1.0

_path: Path | None = None
_lock = threading.RLock()
_rows: list[dict[str, Any]] = []  # spans that have ended and are not yet on disk
_last: dict[int, dict[str, Any]] = {}  # by thread id: the newest of `_rows`, which may still grow
_flushed = 0.0


def record_spans(run_dir: Path, process: str) -> None:
    """Write spans from now on as those of `process` (such as "actor 0"), if the run's folder has a
    folder for spans.

    Spans of an earlier run in the same process are written to that run's folder first.
    """
    global _path, _flushed
    flush_spans()
    folder = run_dir / FOLDER
    if folder.is_dir():
        _flushed = time.time()
        _path = folder / f"{process.replace(' ', '-')}.jsonl"


@contextmanager
def span(name: str, **about: Any) -> Iterator[None]:
    """Record the time that the block takes, with further facts about it (JSON). Costs
    microseconds."""
    if _path is None:
        yield
        return
    # The wall clock places the span in the timeline; it may jump, so the duration is another
    # clock's.
    start, clock = time.time(), time.perf_counter()
    try:
        yield
    finally:
        _add(name, start, start + time.perf_counter() - clock, about)


def _add(name: str, start: float, end: float, about: dict[str, Any]) -> None:
    global _flushed
    thread = threading.get_native_id()
    with _lock:
        last = _last.get(thread)
        if (
            last is not None
            and last["name"] == name
            and last["about"] == about
            and start - last["end"] < MERGE_GAP_S
        ):
            last["end"], last["count"] = end, last["count"] + 1
        else:
            _last[thread] = {
                "name": name,
                "start": start,
                "end": end,
                "thread": thread,
                "count": 1,
                "about": about,
            }
            _rows.append(_last[thread])
        if end - _flushed > FLUSH_S:
            _flushed = end
            flush_spans()


def flush_spans() -> None:
    """Write the spans that have ended."""
    with _lock, suppress(OSError):  # a full disk; a timeline is not worth a run
        rows = list(_rows)
        _rows.clear()
        _last.clear()
        if _path is not None and rows:
            append_lines(_path, *rows)


def read_spans(run_dir: Path) -> list[dict[str, Any]]:
    """Return all spans of a run: name, start and end in Unix seconds, process, thread, count,
    about. Torn lines are left out."""
    files = sorted((run_dir / FOLDER).glob("*.jsonl"))
    return [
        row | {"process": path.stem.replace("-", " ")}
        for path in files
        for row in read_lines(path)[0]
    ]


@contextmanager
def profiler(run_dir: Path, step: int, rank: int) -> Iterator[None]:
    """Write `profile/step_N-rank_R.json.gz` in the run's folder, for ui.perfetto.dev: operators
    and, on a GPU, kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + (
        [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    )
    with profile(activities=activities) as profiled:
        yield
    folder = run_dir / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(folder / f"step_{step}-rank_{rank}.json.gz"))
