"""The runs of a folder as a table for a terminal: `rlinf-vl runs results/`.

A thousand runs take seconds: of metrics, only the few figures shown are looked for in the text, and
of a file of more than `TAIL_BYTES` only its end is read. Configs are compared line by line.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf_vl.observe.status import read_status
from rlinf_vl.tools.report.build import NAMES_OF_A_RUN
from rlinf_vl.tools.report.run_files import check_is_run

#: Bytes of a metrics.jsonl that are read, from its end. Of a longer one, `best` is that of its end.
TAIL_BYTES = 16 * 2**20
#: The figures that are looked for in metrics.jsonl, and their names here.
FIGURES = {
    "step": "step",
    "reward/mean": "reward",
    "reward/accuracy": "accuracy",
    "val/accuracy": "val",
    "val/problems": "problems",
    "time/step": "seconds",
}
_FIGURE = re.compile(
    rb'"(%s)": (-?[\d.]+(?:[eE][-+]?\d+)?)' % b"|".join(name.encode() for name in FIGURES)
)
#: A key of a config as `save_config` writes it: blanks, a name, and perhaps a value.
_KEY = re.compile(r"^( *)([\w.+-]+):(?: (.*))?$")
HEADINGS = (
    "run", "state", "step", "reward", "accuracy", "val", "best val", "n", "hours", "began", "differs in",
)  # fmt: skip
#: Names of states in the table: a run that is gone was killed, or lost with its host.
STATES = {"gone": "killed"}
#: Differences of a run that the table shows.
MAX_SHOWN = 4
#: Keys and sections whose differences come first: what decides what is learned.
FIRST_KEYS = (
    "actor.optim.lr", "algorithm.adv_type", "algorithm.loss_type", "reward.functions", "reward.reward_type",
    "data.train_data_paths", "algorithm.", "reward.", "data.",
)  # fmt: skip


@dataclass
class RunLine:
    """One run of the table.

    Attributes:
        state: starting, running, done, stopped, failed, killed; "" where the run says nothing.
        best, best_step, problems: accuracy of the best validation, its step, and its problems.
        hours: of the steps that are logged.
        is_complete: whether all of the metrics were read, not their end alone.
        differs: key → value where the runs of the table differ.
    """

    run: str
    state: str
    step: int
    total_steps: int | None
    reward: float | None = None
    accuracy: float | None = None
    val: float | None = None
    best: float | None = None
    best_step: int | None = None
    problems: int | None = None
    hours: float = 0.0
    is_complete: bool = True
    started: float | None = None
    reason: str = ""
    differs: dict[str, str] = field(default_factory=dict)


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, those that began last first; none where the folder is itself a
    run's."""
    if _is_run(folder) or not folder.is_dir():
        return []
    runs = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    return sorted(runs, key=lambda run: (-float(read_status(run).get("started") or 0), run.name))


def read_lines_of(runs: Sequence[Path]) -> list[RunLine]:
    """Read the lines of these runs, with the config keys in which they differ."""
    lines = [_read(run) for run in runs]
    configs = [_config_of(run) for run in runs]
    for line, differences in zip(lines, _differences(configs), strict=True):
        line.differs = differences
    return lines


def read_folder(folder: Path) -> list[RunLine]:
    """Read the lines of the runs in a folder, those that began last first."""
    return read_lines_of(runs_in(folder))


def runs_table(lines: Sequence[RunLine]) -> str:
    """Return a table of runs, one a line: its state, its steps and its figures."""
    rows = [HEADINGS, *map(_cells, lines)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    padded_lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded_lines.append("  ".join(cells).rstrip())
    return "\n".join(padded_lines)


def runs_json(lines: Sequence[RunLine]) -> list[dict[str, Any]]:
    """Return the lines for `--json`."""
    return [asdict(line) for line in lines]


def _cells(line: RunLine) -> tuple[str, ...]:
    """Return the cells of a run."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.started)) if line.started else ""
    progress = f"{line.step}/{line.total_steps}" if line.total_steps else str(line.step)
    figures = [_figure(value) for value in (line.reward, line.accuracy, line.val)]
    best_cell = (
        _figure(line.best) if line.is_complete or line.best is None else f"≥ {line.best:.3f}"
    )
    n_problems = "" if line.problems is None else str(line.problems)
    hours = f"{line.hours:.2f}" if line.step else ""
    differences = [f"{key}={value}" for key, value in list(line.differs.items())[:MAX_SHOWN]]
    if len(line.differs) > MAX_SHOWN:
        differences.append(f"and {len(line.differs) - MAX_SHOWN} more")
    cells = (line.run, line.state, progress, *figures, best_cell, n_problems, hours, began)
    return (*cells, " ".join(differences))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _read(run: Path) -> RunLine:
    """Read a run's line, but for `differs`."""
    status = read_status(run)
    state = str(status.get("state", ""))
    line = RunLine(
        run.name,
        STATES.get(state, state),
        0,
        status.get("total_steps") or None,
        started=status.get("started"),
        reason=str(status.get("reason") or "").partition("\n")[0],
    )
    text, line.is_complete = _tail(run / "metrics.jsonl")
    # Of a step that is there twice, after a restart, the later line counts.
    by_step: dict[int, dict[str, float]] = {}
    for row in text.splitlines():
        pairs = _FIGURE.findall(row)
        figures = {FIGURES[name.decode()]: float(value) for name, value in pairs}
        if "step" in figures:
            by_step[int(figures["step"])] = figures
    for step in sorted(by_step):
        figures = by_step[step]
        line.step = step
        line.hours += figures.get("seconds", 0.0) / 3600
        for name in ("reward", "accuracy", "val"):
            if name in figures:
                setattr(line, name, figures[name])
        val = figures.get("val")
        if val is not None and (line.best is None or val >= line.best):
            line.best, line.best_step = val, step
            line.problems = int(figures["problems"]) if "problems" in figures else None
    return line


def _tail(path: Path) -> tuple[bytes, bool]:
    """Return the end of a file, and whether that is all of it; nothing of one that isn't there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read()
    except OSError:
        return b"", True
    is_whole = size <= TAIL_BYTES
    return (text if is_whole else text.partition(b"\n")[2]), is_whole


def _config_of(run: Path) -> dict[str, str]:
    """Return dotted key → value as text, of a file of `save_config`.

    It reads lines, not YAML, which takes a hundredth of the time. The lines of a list or of a text
    belong to the key above them.
    """
    config: dict[str, str] = {}
    with suppress(OSError):
        parents: list[tuple[int, str]] = []  # indentation and name of the keys around a line
        for text in (run / "config.yaml").read_text("utf-8", errors="replace").splitlines():
            match = _KEY.match(text)
            indent = len(match[1]) if match else -1
            inside_text = parents and config.get(_dotted(parents), "")[:1] in ("|", ">")
            if match is None or (inside_text and indent > parents[-1][0]):
                if parents:
                    config[_dotted(parents)] = f"{config.get(_dotted(parents), '')} {text.strip()}"
                continue
            while parents and parents[-1][0] >= indent:
                parents.pop()
            parents.append((indent, match[2]))
            if match[3] is not None:
                config[_dotted(parents)] = match[3]
    return config


def _dotted(parents: Iterable[tuple[int, str]]) -> str:
    return ".".join(name for _, name in parents)


def _differences(configs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return, for each config, the keys in which the configs differ, and its value of each."""
    # A run may have failed before it wrote its config.
    written_configs = [config for config in configs if config]
    keys = dict.fromkeys(key for config in written_configs for key in config)
    differing = [
        key
        for key in keys
        if key not in NAMES_OF_A_RUN
        and not key.startswith("runner.code_files")
        and len({config.get(key) for config in written_configs}) > 1
    ]
    differing.sort(key=_rank)
    return [
        {key: " ".join(config.get(key, "–").split()) for key in differing} if config else {}
        for config in configs
    ]


def _rank(key: str) -> int:
    """Return the position of a key among those that differ."""
    positions = [i for i, name in enumerate(FIRST_KEYS) if key.startswith(name)]
    return min(positions, default=len(FIRST_KEYS))


def _is_run(path: Path) -> bool:
    try:
        check_is_run(path)
    except ValueError:
        return False
    return True
