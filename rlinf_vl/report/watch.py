"""`python -m rlinf_vl watch RUN_DIR`: a run on a terminal, drawn from the files in its folder while it goes on."""

import json
import math
import os
import sys
import textwrap
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlinf_vl.observe.status import read_status
from rlinf_vl.report.run_folder import check_is_run, is_number

CURVES = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "val accuracy": "val/accuracy",
    "entropy": "actor/entropy",
    "rollout/train KL": "actor/rollout_train_kl",
    "grad norm": "actor/grad_norm",
    "response length": "rollout/response_length_mean",
    "truncated": "rollout/truncated",
    "tokens/s": "rollout/tokens_per_second",
}
"""Label → metric. Those that a run has are drawn, in this order."""
WINDOW = 20
"""Rates and phases are those of so many last steps."""
WIDE = 140
"""Columns from which the page has two halves."""
REFRESH_S = 0.5
QUIET_S = 60.0
"""Seconds without a change in `status.json` after which the page says so, if phases usually take less."""

_LEVELS = " ▁▂▃▄▅▆▇█"
_PHASE_LOOKS = (("█", "cyan"), ("▓", "magenta"), ("▒", "blue"), ("░", "green"), ("▪", "yellow"))
_STATE_COLORS = {"running": "green", "starting": "cyan", "done": "green", "failed": "red", "gone": "red"}
_WORKER_LOOKS = {"alive": ("●", "green"), "restarting": ("○", "yellow"), "dead": ("×", "red")}
_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒░▪●○×─━·…", "._-=+*%#+=.:o-x-=|.")


class Follower:
    """The objects of a file of JSON lines, each once, as they appear; a file that was replaced begins anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """What has been added since the call before, and whether the file begins anew. Torn lines are left out."""
        rows: list[dict[str, Any]] = []
        replaced = False
        with suppress(OSError), self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            replaced = stat.st_ino != self._inode or stat.st_size < self._offset
            self._inode = stat.st_ino
            self._offset = 0 if replaced else self._offset
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is still being written
                self._offset += len(line)
                with suppress(ValueError, TypeError):
                    rows.append(dict(json.loads(line)))
        return rows, replaced


class Curve:
    """A metric's value after every step: the one before where a step has none, NaN before the first. `last` is NaN if the last
    value was not finite."""

    def __init__(self) -> None:
        self._values = array("d")
        self.low = math.inf
        self.high = -math.inf
        self.last = math.nan

    def add(self, at: int, value: float | None) -> None:
        """`at`: number of steps before. None: not a finite number."""
        before = self._values[-1] if self._values else math.nan
        self._values.extend([before] * (at - len(self._values)))
        self._values.append(before if value is None else value)
        self.last = math.nan if value is None else value
        self.low, self.high = min(self.low, self._values[-1]), max(self.high, self._values[-1])

    def draw(self, n: int, width: int, height: int) -> list[str]:
        """Bars for `n` steps, from the lowest to the highest mean: `height` strings of `width`, the top one first."""
        bars: list[float] = []
        for x in range(width):
            part = self._values[x * n // width : max(x * n // width + 1, (x + 1) * n // width)]
            bars.append(sum(part) / len(part) if part else bars[-1])
        known = [bar for bar in bars if not math.isnan(bar)] or [0.0]
        low, scale = min(known), (8 * height - 1) / (max(known) - min(known) or 1.0)
        filled = [0 if math.isnan(bar) else 1 + round((bar - low) * scale) for bar in bars]
        return ["".join(_LEVELS[max(0, min(8, f - 8 * row))] for f in filled) for row in reversed(range(height))]


@dataclass
class Steps:
    """What metrics.jsonl says: curves by metric, and seconds by phase of the last steps."""

    first: int = 0
    last: int = 0
    count: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    times: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, row: dict[str, Any]) -> None:
        if type(row.get("step")) is not int:
            return
        self.first = self.first if self.count else row["step"]
        self.last = row["step"]
        for metric in CURVES.values():
            if metric in row:
                value = row[metric] if is_number(row[metric]) else None
                self.curves.setdefault(metric, Curve()).add(self.count, value)
        seconds = {name: value for name, value in row.items() if name.startswith("time/") and is_number(value)}
        self.times.append({name.removeprefix("time/"): value for name, value in seconds.items()})
        self.count += 1

    def usual(self, phase: str) -> float | None:
        """Mean seconds in the last steps that had this phase."""
        known = [times[phase] for times in self.times if times.get(phase)]
        return fmean(known) if known else None


class RunPage:
    """The files of a run's folder, as far as they are there and whole, as lines for a terminal.

    Raises:
        ValueError: the folder isn't there, or isn't a run's.
    """

    def __init__(self, run_dir: Path) -> None:
        check_is_run(run_dir)
        self._run_dir = run_dir
        self._name = _clean(run_dir.resolve().name)
        self._metrics_file = Follower(run_dir / "metrics.jsonl")
        self._events_file = Follower(run_dir / "events.jsonl")
        self._steps = Steps()
        self._events: deque[dict[str, Any]] = deque(maxlen=100)
        self._status: dict[str, Any] = {}
        self.poll()

    def poll(self) -> None:
        """Read what is new."""
        rows, replaced = self._metrics_file.poll()
        self._steps = Steps() if replaced else self._steps
        for row in rows:
            self._steps.add(row)
        rows, replaced = self._events_file.poll()
        if replaced:
            self._events.clear()
        self._events.extend(row for row in rows if row.keys() >= {"time", "step", "kind", "message"})
        self._status = read_status(self._run_dir) or self._status

    @property
    def _state(self) -> str:
        return self._status.get("state", "no status.json")

    @property
    def ended(self) -> bool:
        return self._state in ("done", "stopped", "failed", "gone")

    def _badge(self, now: float) -> Text:
        color, text = _STATE_COLORS.get(self._state, "yellow"), self._state
        quiet = now - self._status.get("time", now)
        longest = max((times.get("step", 0) for times in self._steps.times), default=0)
        if self.ended:
            text = f"ended: {text.replace('gone', 'its process is gone')}"
        elif quiet > max(QUIET_S, 2 * longest):
            text, color = f"no news for {_duration(quiet)}", "yellow"
        return Text(f" {text} ", f"bold {color} reverse")

    def _header(self, width: int, now: float) -> list[Text]:
        badge = self._badge(now)
        step, total = max(self._steps.last, self._status.get("step", 0)), self._status.get("total_steps", 0)
        line = Text.assemble((f" {self._name}", "bold"), f"  step {step}/{total}  " if total else f"  step {step}  ")
        room = min(60, width - line.cell_len - badge.cell_len - 6)
        if total and room >= 8:
            _bar(line, step / total, room).append(f" {step / total:.0%}")
        line.truncate(max(1, width - badge.cell_len - 1), overflow="ellipsis", pad=True)
        parts, status, seconds = [], self._status, self._steps.usual("step")
        if status and self.ended:
            parts.append(f"{_duration(status['time'] - status['started'])} in all")
        elif status:
            parts.append(f"{_duration(now - status['started'])} so far")
            parts.append(f"{_duration(seconds * (total - step))} left" if seconds and total else "")
        parts.append(f"{seconds:.3g} s a step" if seconds else "")
        parts.append(f"process {status['pid']} on {status['host']}" if status else "")
        return [Text.assemble(line, " ", badge), Text(" " + " · ".join(filter(None, parts)), "dim")]

    def _reason_lines(self, width: int, height: int) -> list[Text]:
        """Why the run has ended, where it was not meant to, in at most `height` lines."""
        reason = self._status.get("reason", "") if self.ended else ""
        lines = [part for line in reason.splitlines() for part in textwrap.wrap(_clean(line), max(20, width - 2))]
        return [Text(f" {line}", "red") for line in lines[:height]]

    def _curve_lines(self, width: int, height: int) -> list[Text]:
        steps, spark = self._steps, max(8, width - 48)
        each = max(1, min(8, (height - 1) // max(1, len(steps.curves))))
        title = f"curves, steps {steps.first} to {steps.last} " if steps.count else "curves, no step is done yet "
        lines = [_rule(f"{title:─<{spark + 15}}{' last ':─>10}{' lowest ':─>10}{' highest ':─>10}", width)]
        for label, curve in ((label, steps.curves[name]) for label, name in CURVES.items() if name in steps.curves):
            rows = curve.draw(steps.count, spark, max(1, each - 1))
            last = (f"{_short(curve.last):>10}", "bold red" if math.isnan(curve.last) else "bold")
            ends = (f"{_short(curve.low):>10}{_short(curve.high):>10}", "dim")
            lines.append(Text.assemble(f" {label:<17}", (rows[0], "cyan"), last, ends))
            lines += [Text(" " * 18 + row, "cyan") for row in rows[1:]] + [Text()] * (each > 1)
        return lines

    def _phase_lines(self, width: int, now: float) -> list[Text]:
        times = self._steps.times
        lines = [_rule(f"phases now and in the last {len(times)} steps" if times else "phases", width)]
        phase, progress = self._status.get("phase"), self._status.get("progress")
        if phase and not self.ended:
            took, usual = _duration(now - self._status["phase_since"]), self._steps.usual(phase)
            usually = (f" (usually {usual:.3g} s)" if usual else "", "dim")
            lines.append(Text.assemble(" now  ", (phase, "bold"), f"  {took}", usually))
            if progress and (total := progress["total"]):
                _bar(lines[-1].append("  "), progress["done"] / total, 20).append(f" {progress['done']:,} of {total:,}")
        sums: Any = sum(map(Counter, times), Counter[str]())  # of floats
        whole, parts = max(sums.pop("step", 0.0), sums.total()), sums.most_common(len(_PHASE_LOOKS) - 1)
        parts.append(("other", whole - sum(seconds for _, seconds in parts)))
        used, end, bar, legend = 0.0, 0, Text(" last "), Text(" ")
        for (name, seconds), (glyph, color) in zip(parts, _PHASE_LOOKS, strict=False):
            start, used = end, used + seconds
            end = round(used / (whole or 1.0) * min(120, width - 7))
            bar.append(glyph * (end - start), color)
            legend.append(glyph, color).append(f" {name} {seconds / (whole or 1.0):.0%} ")
        return lines + [bar, legend] * (whole > 0)

    def _worker_lines(self, width: int, height: int) -> list[Text]:
        """A line on each kind of worker, and one on each worker as far as there is room, the troubled first."""
        kinds, workers = {}, self._status.get("workers", [])
        lines = [_rule("workers" if workers else "workers: none yet", width)]
        for w in workers:
            kinds.setdefault(w["name"].split()[0], []).append(w)
        for kind, members in kinds.items():
            states, restarts = Counter(w["state"] for w in members), sum(w["restarts"] for w in members)
            looks = [_WORKER_LOOKS[w["state"]] for w in members[: max(8, width - 50)]]
            about = ", ".join(f"{n} {state}" for state, n in states.most_common())
            lines.append(Text.assemble(f" {kind:<9} ", *looks, "  ", about))
            lines[-1].append(f", restarts: {restarts}" if restarts else "", "yellow")
        for w in sorted(workers, key=lambda w: (w["state"] == "alive", -w["restarts"]))[: max(0, height - len(lines))]:
            about = f" {w['state']}, process {w['pid']} on {w['node']}, restarts: {w['restarts']}"
            lines.append(Text.assemble("   ", _WORKER_LOOKS[w["state"]], f" {w['name']:<12}", (about, "dim")))
        return lines

    def _newest_events(self, width: int, height: int) -> list[Text]:
        lines = [_rule("events, the newest first" if self._events else "events: none", width)]
        for event in list(self._events)[::-1][: max(0, height - 1)]:
            clock, kind = time.strftime(" %H:%M:%S", time.localtime(event["time"])), event["kind"].replace("_", " ")
            about = f" step {event['step']} ", (kind, "yellow"), f": {_clean(event['message'])}"
            lines.append(Text.assemble((clock, "dim"), *about))
        return lines

    def draw(self, width: int, height: int, now: float) -> list[Text]:
        """At most `height` lines, each exactly `width` wide, as of `now` in Unix seconds."""
        head = self._header(width, now) + self._reason_lines(width, height // 4)
        body = height - len(head)
        if width >= WIDE:
            left, right = width - width * 9 // 20, width * 9 // 20 - 3
            side = self._phase_lines(right, now) + self._worker_lines(right, body // 2)
            side += self._newest_events(right, body - len(side))
            halves = _fit(self._curve_lines(left, body), left, body), _fit(side, right, body)
            return _fit(head + [Text.assemble(a, "   ", b) for a, b in zip(*halves, strict=True)], width, height)
        below = self._phase_lines(width, now) + self._worker_lines(width, 0)
        lines = self._curve_lines(width, body - len(below) - min(6, max(2, 1 + len(self._events)))) + below
        lines += self._newest_events(width, max(2, body - len(lines)))
        return _fit(head + lines, width, min(height, len(head) + len(lines)))


def watch(run_dir: Path, *, once: bool = False, console: Console | None = None) -> int:
    """Follow a run until it ends or Ctrl-C; one page only if `once` or without a terminal. The exit code: 2 if it is no run."""
    console = console or Console(highlight=False)
    try:
        page = RunPage(run_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def drawn(height: int) -> Group:
        lines = page.draw(console.width, height, time.time())
        if console.options.ascii_only:
            lines = [Text(line.plain.translate(_ASCII)) for line in lines]
        return Group(*lines)

    with suppress(KeyboardInterrupt):
        if console.is_terminal and not once and not page.ended:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not page.ended:
                    live.update(drawn(console.height), refresh=True)
                    time.sleep(REFRESH_S)
                    page.poll()
        console.print(drawn(console.height - 1))
    return 0


def _fit(lines: Sequence[Text], width: int, height: int) -> list[Text]:
    """Exactly `height` lines of exactly `width` cells."""
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
    """One line without control characters, which could steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text))
