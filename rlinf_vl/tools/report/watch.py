"""`rlinf-vl watch RUN_DIR`: a run on a terminal, drawn from the files in its folder while
it goes on."""

import math
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlinf_vl.observe.metrics_file import read_metrics
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.files import read_lines
from rlinf_vl.tools.report.newest import Newest, read_newest
from rlinf_vl.tools.report.run_files import check_is_run

#: Curve's label → metric. Curves that a run has are drawn in this order, then its environment's.
CURVES = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "val accuracy": "val/accuracy",
    "entropy": "actor/entropy",
    "rollout/train KL": "actor/rollout_train_kl",
    "grad norm": "actor/grad_norm",
    "response length": "rollout/response_length_mean",
    "turns": "rollout/turns_mean",
    "truncated": "rollout/truncated",
    "tokens/s": "rollout/tokens_per_second",
}
#: Curves at most of the environment's measurements.
MAX_MEASURED = 6
#: Lines of a terminal from which a page without halves shows the newest conversation.
TALL = 40
#: Newest steps over which durations of steps and phases are averaged.
WINDOW = 20
#: Columns of a terminal from which the page has two halves.
WIDE = 140
#: Seconds between two drawings of the page.
REFRESH_S = 0.5
#: Seconds without a change in `status.json` after which the page says so, if phases usually take
#: less.
QUIET_S = 60.0

_LEVELS = " ▁▂▃▄▅▆▇█"
#: Glyph and color of a phase in the bar, the longest phase first.
_PHASE_LOOKS = [("█", "cyan"), ("▓", "magenta"), ("▒", "blue"), ("░", "green"), ("▪", "yellow")]
_STATE_COLORS = {
    "running": "green",
    "starting": "cyan",
    "done": "green",
    "failed": "red",
    "gone": "red",
}
_WORKER_LOOKS = {
    "alive": ("●", "green"),
    "restarting": ("○", "yellow"),
    "dead": ("×", "red"),
    "ended": ("·", "dim"),
}
#: Replacements where the terminal's encoding has no block elements.
_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒░▪●○×─━·…▀▣→", "._-=+*%#+=.:o-x-=|. #>")


class Curve:
    """A metric's value after every step: the one before where a step has none, NaN before the
    first.

    `last` is NaN if the last value was not finite. At least one of `rows` has the metric.
    """

    def __init__(self, rows: Sequence[Mapping[str, float | None]], metric: str) -> None:
        values = np.array([row.get(metric) for row in rows], np.float64)  # None is NaN
        # index of the last step that has a value, for each step
        last_known = np.maximum.accumulate(np.where(np.isnan(values), 0, np.arange(len(values))))
        self._values = values[last_known]
        self.last = float(values[max(i for i, row in enumerate(rows) if metric in row)])
        self.low = float(np.fmin.reduce(values))
        self.high = float(np.fmax.reduce(values))

    def draw(self, width: int, height: int) -> list[str]:
        """Return bars from the lowest to the highest mean: `height` strings of `width`, the top one
        first."""
        edges = np.arange(width + 1) * len(self._values) // width
        bars = np.array([self._values[a : max(a + 1, b)].mean() for a, b in pairwise(edges)])
        low, high = np.fmin.reduce(bars), np.fmax.reduce(bars)
        # in eighths of a cell; the lowest bar has one, so that it differs from no value
        filled = np.nan_to_num(
            1 + np.round((bars - low) * (8 * height - 1) / (high - low or 1.0))
        ).astype(int)
        lines = []
        for row in reversed(range(height)):
            levels = np.clip(filled - 8 * row, 0, 8)  # eighths of this row's cells
            lines.append("".join(_LEVELS[level] for level in levels))
        return lines


class RunPage:
    """The readable files of a run's folder as lines for a terminal."""

    def __init__(self, run_dir: Path) -> None:
        check_is_run(run_dir)
        self._run_dir = run_dir
        self._name = _clean(run_dir.resolve().name)
        self._versions: dict[str, tuple[int, ...]] = {}
        self._metrics: list[dict[str, Any]] = []
        self._curves: dict[str, Curve] = {}
        self._times: list[dict[str, float]] = []  # seconds by phase, of the last steps
        self._events: list[dict[str, Any]] = []
        self._newest: Newest | None = None
        self._status: dict[str, Any] = {}
        self.poll()

    def poll(self) -> None:
        """Read the files that have changed."""
        if self._changed("metrics.jsonl"):
            rows = self._metrics = read_metrics(self._run_dir, [])
            logged = set(chain.from_iterable(rows))
            # of a run with one turn, the curve of turns is a line at 1
            if not any((row.get("rollout/turns_max") or 1) > 1 for row in rows):
                logged.discard("rollout/turns_mean")
            measured = [
                name for name in sorted(logged) if name.removeprefix("val/").startswith("env/")
            ][:MAX_MEASURED]
            curves = CURVES | {_clean(name)[:16]: name for name in measured}
            self._curves = {
                label: Curve(rows, metric) for label, metric in curves.items() if metric in logged
            }
            self._times = [_phase_times(row) for row in rows[-WINDOW:]]
        if self._changed("events.jsonl"):
            with suppress(OSError):
                rows, _ = read_lines(self._run_dir / "events.jsonl")
                self._events = [
                    row for row in rows if row.keys() >= {"time", "step", "kind", "message"}
                ]
        files = (self._run_dir / "trajectories").glob("step_*.parquet")
        newest = max(files, key=lambda file: (len(file.name), file.name), default=None)
        if newest is not None and self._changed(str(newest.relative_to(self._run_dir))):
            # a file that can't be read leaves the former conversation on the page
            self._newest = read_newest(newest) or self._newest
        # likewise a status that is torn or missing for a moment
        self._status = read_status(self._run_dir) or self._status

    def _changed(self, name: str) -> bool:
        """Return whether a file differs from the one at the last call."""
        last_version = self._versions.get(name)
        with suppress(OSError):
            stat = (self._run_dir / name).stat()
            self._versions[name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return self._versions.get(name) != last_version

    def _usual_seconds(self, phase: str) -> float | None:
        """Return the mean seconds in the last steps that had this phase; None without such a
        step."""
        phase_times = [times[phase] for times in self._times if times.get(phase)]
        return fmean(phase_times) if phase_times else None

    @property
    def _state(self) -> str:
        return self._status.get("state", "no status.json")

    @property
    def ended(self) -> bool:
        return self._state in ("done", "stopped", "failed", "gone")

    def _badge(self, time_s: float) -> Text:
        """Return the state of the run, or that nothing was written for longer than a step takes."""
        color, text = _STATE_COLORS.get(self._state, "yellow"), self._state
        quiet = time_s - self._status.get("time", time_s)
        if self.ended:
            text = f"ended: {text.replace('gone', 'its process is gone')}"
        elif quiet > max([QUIET_S, *(2 * times.get("step", 0.0) for times in self._times)]):
            text, color = f"no news for {_duration(quiet)}", "yellow"
        return Text(f" {text} ", f"bold {color} reverse")

    def _header(self, width: int, height: int, time_s: float) -> list[Text]:
        """Return the run, its state and its times, and the reason if it ended early.

        The reason has at most `height` lines.
        """
        badge, status, seconds = self._badge(time_s), self._status, self._usual_seconds("step")
        step, total = status.get("step", 0), status.get("total_steps", 0)
        # status.json is written with a delay, metrics.jsonl at once
        step = max(step, self._metrics[-1]["step"]) if self._metrics else step
        line = Text.assemble(
            (f" {self._name}", "bold"), f"  step {step}/{total}  " if total else f"  step {step}  "
        )
        room = min(60, width - line.cell_len - badge.cell_len - 6)
        if total and room >= 8:
            _bar(line, step / total, room).append(f" {step / total:.0%}")
        line.truncate(max(1, width - badge.cell_len - 1), overflow="ellipsis", pad=True)
        parts = [f"{seconds:.3g} s a step"] if seconds else []
        if status and self.ended:
            parts = [f"{_duration(status['time'] - status['started'])} in all", *parts]
        elif status:
            parts = (
                [f"{_duration(seconds * (total - step))} left", *parts]
                if seconds and total
                else parts
            )
            parts = [f"{_duration(time_s - status['started'])} so far", *parts]
        parts += [f"process {status['pid']} on {status['host']}"] if status else []
        lines = [Text.assemble(line, " ", badge), Text(f" {' · '.join(parts)}", "dim")]
        reason = status.get("reason", "") if self.ended else ""
        wrapped = []
        for line_of_reason in reason.splitlines():
            wrapped += textwrap.wrap(_clean(line_of_reason), max(20, width - 2))
        return lines + [Text(f" {part}", "red") for part in wrapped[:height]]

    def _curve_lines(self, width: int, height: int) -> list[Text]:
        """Return the curves, each as high as there is room."""
        rows, spark = self._metrics, max(8, width - 48)
        curve_height = max(1, min(8, (height - 1) // max(1, len(self._curves))))
        title = f"steps {rows[0]['step']} to {rows[-1]['step']}" if rows else "no step is done yet"
        title = f"curves, {title} "
        lines = [
            _rule(
                f"{title:─<{spark + 15}}{' last ':─>10}{' lowest ':─>10}{' highest ':─>10}", width
            )
        ]
        for label, curve in self._curves.items():
            bars = curve.draw(spark, max(1, curve_height - 1))
            line = Text(f" {label:<17}").append(bars[0], "cyan")
            line.append(
                f"{_short(curve.last):>10}", "bold red" if math.isnan(curve.last) else "bold"
            )
            line.append(f"{_short(curve.low):>10}{_short(curve.high):>10}", "dim")
            lines.append(line)
            lines += [Text(" " * 18 + row, "cyan") for row in bars[1:]] + [Text()] * (
                curve_height > 1
            )
        return lines

    def _phase_lines(self, width: int, time_s: float) -> list[Text]:
        """Return lines on the present phase, and a bar of the phases of the last steps."""
        lines = [
            _rule(
                f"phases now and in the last {len(self._times)} steps" if self._times else "phases",
                width,
            )
        ]
        phase, progress = self._status.get("phase"), self._status.get("progress")
        if phase and not self.ended:
            usual = self._usual_seconds(phase)
            line = Text.assemble(
                " now  ", (phase, "bold"), f"  {_duration(time_s - self._status['phase_since'])}"
            )
            line.append(f" (usually {usual:.3g} s)" if usual else "", "dim")
            lines.append(line)
            if progress and (total := progress["total"]):
                _bar(lines[-1].append("  "), progress["done"] / total, 20).append(
                    f" {progress['done']:,} of {total:,}"
                )
        sums: Any = sum(map(Counter, self._times), Counter[str]())  # of floats
        # phases of a step may overlap and add up to more than it
        total_s = max(sums.pop("step", 0.0), sums.total())
        if not total_s:
            return lines
        shares = {
            name: seconds / total_s for name, seconds in sums.most_common(len(_PHASE_LOOKS) - 1)
        }
        shares["other"] = 1 - sum(shares.values())
        edges = [round(x * min(120, width - 7)) for x in accumulate(shares.values(), initial=0.0)]
        bar, legend = Text(" last "), Text(" ")
        for (name, share), (glyph, color), (start, end) in zip(
            shares.items(), _PHASE_LOOKS, pairwise(edges), strict=False
        ):
            bar.append(glyph * (end - start), color)
            legend.append(glyph, color).append(f" {name} {share:.0%} ")
        return [*lines, bar, legend]

    def _worker_lines(self, width: int, height: int) -> list[Text]:
        """Return a line on each kind of worker, and on each worker as far as there is room, the
        troubled first."""
        workers = self._status.get("workers", [])
        # Their states are those of the last moment in which the run could write them.
        if self.ended:
            workers = [w | {"state": "ended"} if w["state"] != "dead" else w for w in workers]
        none = "workers: none" if self.ended else "workers: none yet"
        lines = [_rule("workers" if workers else none, width)]
        for kind in dict.fromkeys(w["name"].split()[0] for w in workers):
            members = [w for w in workers if w["name"].split()[0] == kind]
            states, restarts = (
                Counter(w["state"] for w in members),
                sum(w["restarts"] for w in members),
            )
            line = Text(f" {kind:<9} ")
            for worker in members[: max(8, width - 50)]:
                line.append(*_WORKER_LOOKS[worker["state"]])
            line.append("  " + ", ".join(f"{n} {state}" for state, n in states.most_common()))
            lines.append(line)
            lines[-1].append(f", restarts: {restarts}" if restarts else "", "yellow")
        troubled_first = sorted(
            workers, key=lambda w: (w["state"] in ("alive", "ended"), -w["restarts"])
        )
        for w in troubled_first[: max(0, height - len(lines))]:
            about = f" {w['state']}, process {w['pid']} on {w['node']}, restarts: {w['restarts']}"
            lines.append(
                Text.assemble("   ", _WORKER_LOOKS[w["state"]], f" {w['name']:<12}", (about, "dim"))
            )
        return lines

    def _newest_events(self, width: int, height: int) -> list[Text]:
        """Return a line on each event, the newest first."""
        lines = [_rule("events, the newest first" if self._events else "events: none", width)]
        for event in self._events[::-1][: max(0, height - 1)]:
            clock, kind = (
                time.strftime(" %H:%M:%S", time.localtime(event["time"])),
                event["kind"].replace("_", " "),
            )
            step, message = event["step"], _clean(event["message"])
            lines.append(
                Text.assemble((clock, "dim"), f" step {step} ", (kind, "yellow"), f": {message}")
            )
        return lines

    def _conversation(self, width: int, height: int) -> list[Text]:
        """Return the newest conversation in at most `height` lines; no lines where there is
        none."""
        if self._newest is None or height < 4:
            return []
        title = _rule(f"newest conversation: {_clean(self._newest.title)}", width)
        return [title, *self._newest.draw(self._run_dir, width, height - 1)]

    def draw(self, width: int, height: int, time_s: float) -> list[Text]:
        """Return at most `height` lines, each exactly `width` wide, as of `time_s` in Unix
        seconds."""
        head = self._header(width, height // 4, time_s)
        body = height - len(head)
        if width >= WIDE:
            left, right = width - width * 9 // 20, width * 9 // 20 - 3
            side = self._phase_lines(right, time_s) + self._worker_lines(right, body // 2)
            side += self._newest_events(right, body - len(side))
            conversation = self._conversation(left, body // 2)
            curves = self._curve_lines(left, body - len(conversation))
            left_half = _fit(
                _fit(curves, left, body - len(conversation)) + conversation, left, body
            )
            right_half = _fit(side, right, body)
            rows = [Text.assemble(a, "   ", b) for a, b in zip(left_half, right_half, strict=True)]
            return _fit(head + rows, width, height)
        below = self._phase_lines(width, time_s) + self._worker_lines(width, 0)
        below += self._conversation(width, body // 2) if height >= TALL else []
        # curves get the lines that are left; events at least two, as many as there are up to six
        lines = (
            self._curve_lines(width, body - len(below) - min(6, max(2, 1 + len(self._events))))
            + below
        )
        lines += self._newest_events(width, max(2, body - len(lines)))
        return _fit(head + lines, width, min(height, len(head) + len(lines)))


def watch(run_dir: Path, *, once: bool = False, console: Console | None = None) -> None:
    """Follow a run until it ends or Ctrl-C; print one page only if `once` or without a terminal.

    Raises:
        ValueError: the folder isn't there, or isn't a run's.
    """
    console = console or Console(highlight=False)
    page = RunPage(run_dir)

    def render(height: int) -> Group:
        """Return the page as it is now, in at most `height` lines."""
        lines = page.draw(console.width, height, time.time())
        if console.options.ascii_only:
            lines = [Text(line.plain.translate(_ASCII)) for line in lines]
        return Group(*lines)

    with suppress(KeyboardInterrupt):
        if console.is_terminal and not once and not page.ended:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not page.ended:
                    live.update(render(console.height), refresh=True)
                    time.sleep(REFRESH_S)
                    page.poll()
        console.print(render(console.height - 1))


def _phase_times(row: Mapping[str, float | None]) -> dict[str, float]:
    """Return the seconds of a step by phase, the whole step as "step"."""
    return {
        name.removeprefix("time/"): x
        for name, x in row.items()
        if name.startswith("time/") and x is not None
    }


def _fit(lines: Sequence[Text], width: int, height: int) -> list[Text]:
    """Return exactly `height` lines of exactly `width` cells."""
    fitted = [line.copy() for line in lines[:height]] + [Text() for _ in range(height - len(lines))]
    for line in fitted:
        line.truncate(width, overflow="ellipsis", pad=True)
    return fitted


def _rule(title: str, width: int) -> Text:
    return Text(f"─ {title} ".ljust(width, "─"), "dim")


def _bar(line: Text, share: float, width: int) -> Text:
    full = round(min(1.0, share) * width)
    return line.append("━" * full, "cyan").append("─" * (width - full), "dim")


def _short(x: float) -> str:
    return f"{x:,.0f}" if 1000 <= abs(x) < 1e7 else f"{x:.3g}"


def _duration(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _clean(text: Any) -> str:
    """Return one line without control characters, which could steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text))
