"""A run's progress for a person: a live line on a terminal, a bar and a table in a notebook, log
lines elsewhere."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from rlinf_vl.errors import without_colors
from rlinf_vl.observe.notebook import NotebookProgress, in_notebook
from rlinf_vl.observe.status import StatusFile, last_words

logger = logging.getLogger(__name__)

#: The terminal of both the live line and the log: two consoles would tear each other's lines.
_CONSOLE = Console(stderr=True)


class _Figure(NamedTuple):
    """A figure of a progress line. One label means one metric."""

    label: str
    metric: str
    format: str


_FIGURES = [
    _Figure("reward", "reward/mean", "{:.3f}"),
    _Figure("accuracy", "reward/accuracy", "{:.3f}"),
    _Figure("val loss", "val/loss", "{:.4f}"),
    _Figure("val", "val/accuracy", "{:.3f}"),
    _Figure("tied", "reward/zero_std_groups", "{:.0f}"),
    _Figure("cut", "rollout/truncated", "{:.0%}"),
    _Figure("ref_kl", "actor/ref_kl", "{:.2g}"),
    _Figure("mismatch", "actor/rollout_train_kl", "{:.2g}"),
    _Figure("tok/s", "rollout/tokens_per_second", "{:,.0f}"),
]
#: Steps from whose mean duration the time left is extrapolated.
_WINDOW = 20


class _PlainFormatter(logging.Formatter):
    """A formatter without colors, for files and pipes: Ray colors the tracebacks in its errors
    everywhere."""

    def format(self, record: logging.LogRecord) -> str:
        return without_colors(super().format(record))


def setup_logging(level: int = logging.INFO, console: Console | None = None) -> None:
    """Send the library's log to the terminal, above the live line, or as plain lines to a file or
    pipe.

    Other libraries' loggers keep their levels. Calling it again replaces the handler.
    """
    console = console or _CONSOLE
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.get_name() == __name__]:
        root.removeHandler(handler)
    if console.is_terminal:
        handler: logging.Handler = RichHandler(
            console=console, show_path=False, log_time_format="[%X]"
        )
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.set_name(__name__)
    root.addHandler(handler)
    logging.getLogger("rlinf_vl").setLevel(level)


@contextmanager
def shown_log() -> Iterator[None]:
    """Set up logging for a run within a user's own program, and undo it afterwards.

    A program that has set up its own logging keeps it. A notebook shows the run's progress, so only
    warnings of the log.
    """
    root = logging.getLogger()
    library_logger = logging.getLogger("rlinf_vl")
    level = library_logger.level
    sets_up_logging = not root.handlers
    # On its import, Ray advises a notebook's user to install packages that a run does not need.
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)
    if sets_up_logging:
        setup_logging(logging.WARNING if in_notebook() else logging.INFO)
    try:
        yield
    finally:
        if sets_up_logging:
            root.handlers = [handler for handler in root.handlers if handler.get_name() != __name__]
            library_logger.setLevel(level)


class PhaseClock:
    """The clock of start-up: its seconds and those of its present phase, until `stop` ends it with
    the first step."""

    def __init__(self) -> None:
        self._start_s = self._phase_start_s = time.perf_counter()
        self._phase = ""
        self._runs = True

    def enter(self, phase: str) -> bool:
        """Return whether this begins a phase of start-up; its time counts from now."""
        if not self._runs or phase == self._phase:
            return False
        self._phase, self._phase_start_s = phase, time.perf_counter()
        return True

    def stop(self) -> None:
        self._runs = False

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def shown(self) -> str:
        """Return the phase's elapsed seconds as a suffix of its name; "" once start-up is over."""
        return f" ({time.perf_counter() - self._phase_start_s:.0f} s)" if self._runs else ""


class _PhaseColumn(ProgressColumn):
    """The present phase at the end of the live line, with a clock during start-up."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__()
        self._clock = clock

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['phase']}{self._clock.shown}", style="dim")


class RunProgress:
    """The progress of a run, on the terminal and in `status`.

    A context manager: call `begin` once the run's length is known, `update` after every step,
    `phase` when another part of the run begins.

    Attributes:
        end: how the run ends: done, stopped or failed.
        reason: why it stopped or failed.
    """

    def __init__(self, status: StatusFile | None = None, *, console: Console | None = None) -> None:
        self.end = "done"
        self.reason = ""
        self._status = status
        self._total = 0
        self._step = 0
        self._console = console or _CONSOLE
        self._step_ends_s: deque[float] = deque(maxlen=_WINDOW + 1)  # of the last steps, monotonic
        self._clock = PhaseClock()
        self._validation: dict[str, float] = {}
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[summary]}", markup=False),
            _PhaseColumn(self._clock),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._notebook = NotebookProgress() if in_notebook() else None
        self._task = self._live.add_task("run", total=0, completed=0, summary="", phase="start-up")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.end, self.reason = "stopped", "stopped at once by a signal, without a checkpoint"
        elif error is not None:
            self.end, self.reason = "failed", last_words(error)
        self._update_status(state=self.end, reason=self.reason, phase="")
        if self._notebook is not None:
            ending = (self.reason or self.end).splitlines()[0]
            self._notebook.end(
                self._step,
                self._total,
                ending if ending.startswith(self.end) else f"{self.end}: {ending}",
            )

    def _update_status(self, **changes: Any) -> None:
        if self._status is not None:
            self._status.update(**changes)

    def workers(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Write the run's workers and their states to the status, as in `StatusFile.update`."""
        self._update_status(workers=list(workers))

    def begin(self, total_steps: int, start_step: int = 0) -> None:
        """Begin the steps of a run of `total_steps`, of which `start_step` were done before it was
        resumed."""
        self._total, self._step = total_steps, start_step
        self._clock.stop()
        self._update_status(state="running", step=start_step, total_steps=total_steps)
        self._live.update(self._task, total=total_steps, completed=start_step)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the present phase (generate, train, sync, validate, …), `done` of `total` parts of
        it finished.

        During start-up, the seconds of each phase are shown beside it, and a log that is no
        terminal gets a line for each phase.
        """
        if self._clock.enter(name) and not self._console.is_terminal:
            logger.info("start-up, %.0f s: %s", self._clock.total_s, name)
        self._update_status(
            phase=name, progress=None if total is None else {"done": done, "total": total}
        )
        name = name if total is None else f"{name}: {done} of {total}"
        self._live.update(self._task, phase=name)
        if self._notebook is not None:
            self._notebook.show(self._step, self._total, f"{name}{self._clock.shown}")
        if not self._console.is_terminal:
            logger.debug("step %d/%d: %s", self._step, self._total, name)

    def update(self, step: int, metrics: Mapping[str, float], alarms: Iterable[str] = ()) -> None:
        """Show that step `step` (counted from 1) is done, its metrics, and the alarms that hold.

        The last validation stays visible.
        """
        self._step = step
        self._update_status(step=step)
        self._step_ends_s.append(time.monotonic())
        for name in ("val/loss", "val/accuracy"):
            if name in metrics:
                self._validation[name] = metrics[name]
        figures = self._figures(self._validation | dict(metrics)) | {
            f"! {a.replace('_', ' ')}": "" for a in alarms
        }
        summary = "  ".join(f"{name} {figure}".rstrip() for name, figure in figures.items())
        self._live.update(self._task, completed=step, summary=summary)
        if self._notebook is not None:
            left = figures.pop("left", "")
            self._notebook.show(step, self._total, left and f"left {left}", figures)
        if not self._console.is_terminal:
            logger.info("step %d/%d  %s", step, self._total, summary)

    def _figures(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return the figures of a step by the labels of `_FIGURES`, and the time left."""
        figures: dict[str, str] = {}
        # Where there is a reward, the loss of a step says little.
        if "reward/mean" not in metrics and "actor/loss" in metrics:
            figures["loss"] = f"{float(metrics['actor/loss']):.4f}"
        for figure in _FIGURES:
            if figure.metric in metrics:
                figures[figure.label] = figure.format.format(float(metrics[figure.metric]))
        seconds = metrics.get("time/step")
        # From end to end: waits between steps count, start-up does not.
        if len(self._step_ends_s) > 1:
            seconds = (self._step_ends_s[-1] - self._step_ends_s[0]) / (len(self._step_ends_s) - 1)
        if seconds is not None and self._step < self._total:
            figures["left"] = str(timedelta(seconds=round(seconds * (self._total - self._step))))
        return figures
