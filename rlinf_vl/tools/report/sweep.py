"""`report --sweep FOLDER`: all runs of a folder on one page, seeds as repetitions of a setting.

A setting is a combination of the values of a sweep's axes, seeds aside. Its curves are means over
its seeds, with a band of one standard deviation. A folder without `sweep.json`, such as that of a
shell loop, has as axes the config keys in which its runs differ.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from rlinf_vl.config.sweeps import SEEDS, SWEEP_FILE
from rlinf_vl.observe.metrics_file import flatten, read_metrics
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.tools.report.build import ASSETS, NAMES_OF_A_RUN, PLOT_SCRIPT, asset, script_hash
from rlinf_vl.tools.report.run_files import standard_error
from rlinf_vl.tools.report.runs_table import runs_in

#: Metrics that have a chart where a run logged them, and its title.
CHARTS = {
    "val/accuracy": "Validation accuracy",
    "val/loss": "Validation loss",
    "reward/mean": "Reward",
    "reward/accuracy": "Accuracy of training answers",
    "reward/zero_std_groups": "Groups that tie",
    "actor/loss": "Loss",
    "actor/entropy": "Entropy",
    "actor/grad_norm": "Gradient norm",
    "actor/approx_kl": "KL to the policy that sampled",
    "actor/rollout_train_kl": "KL of engine and trainer",
    "rollout/response_length_mean": "Tokens of a response",
    "time/step": "Seconds of a step",
}
#: Points of a run's curve at most: longer ones are thinned out evenly.
MAX_POINTS = 600
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        values: axis → value as text.
        config: dotted key → value as text; empty before the run has begun.
    """

    name: str
    values: dict[str, str]
    config: dict[str, str]
    metrics: list[dict[str, float | None]]
    status: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.metrics[-1]["step"] or 0) if self.metrics else 0

    @property
    def state(self) -> str:
        return str(self.status.get("state") or "not begun")

    @property
    def hours(self) -> float:
        return sum(row.get("time/step") or 0.0 for row in self.metrics) / 3600

    def column(self, metric: str) -> tuple[list[float], list[float]]:
        """Return the steps that logged a metric, and its values there."""
        rows = [row for row in self.metrics if row.get(metric) is not None]
        return [row["step"] or 0 for row in rows], [row[metric] or 0.0 for row in rows]

    @property
    def best(self) -> dict[str, float | None] | None:
        """The row of the best validation, the latest of equal ones."""
        rows = [row for row in self.metrics if row.get("val/accuracy") is not None]
        return max(rows, key=lambda row: (row["val/accuracy"], row["step"]), default=None)


@dataclass(frozen=True)
class Setting:
    """The runs that differ in nothing but their seeds.

    Attributes:
        values: the setting's value of each axis.
    """

    values: tuple[str, ...]
    members: tuple[Member, ...]
    label: str

    def figure(self, values: Sequence[float | None]) -> dict[str, Any] | None:
        """Return mean, sample deviation and number of what the members have; None for nothing."""
        present = [value for value in values if value is not None]
        if not present:
            return None
        deviation = statistics.stdev(present) if len(present) > 1 else None
        return {"mean": statistics.fmean(present), "deviation": deviation, "n": len(present)}

    @property
    def best_accuracy(self) -> dict[str, Any] | None:
        """The members' best validations."""
        return self.figure([m.best["val/accuracy"] if m.best else None for m in self.members])

    def last(self, metric: str) -> dict[str, Any] | None:
        """Return the figure of the members' last values of a metric."""
        columns = [member.column(metric)[1] for member in self.members]
        return self.figure([column[-1] if column else None for column in columns])


def build_sweep_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a folder of runs, by default as its report.html, and return its path.

    Raises:
        ValueError: the folder has no runs.
    """
    axes, members = read_sweep(folder)
    settings = group_by_setting(axes, members)
    keys = dict.fromkeys(key for member in members for key in member.config)
    begun_members = [member for member in members if member.config]
    differing = {
        key: sorted({member.config.get(key, "–") for member in begun_members})
        for key in keys
        if key not in (*axes, *SEEDS, *NAMES_OF_A_RUN)
        and not key.startswith("runner.code_files")
        and len({member.config.get(key, "–") for member in begun_members}) > 1
    }
    output = output or folder / "report.html"
    page = _render(folder, axes, members, settings, differing)
    with write_aside(output, durable=False) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")
    return output


def read_sweep(folder: Path) -> tuple[list[str], list[Member]]:
    """Return the axes, settings first, and the runs of a folder.

    Raises:
        ValueError: it has no runs.
    """
    file = folder / SWEEP_FILE
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        members = [_member(folder / run["name"], run["values"]) for run in content["runs"]]
        return list(content["axes"]), members
    runs = runs_in(folder)
    if not runs:
        raise ValueError(
            f"--sweep {folder}: has neither a {SWEEP_FILE} nor folders of runs; name the folder "
            "that `train --multirun` wrote, or one with runs in it"
        )
    members = [_member(run, {}) for run in reversed(runs)]
    keys = dict.fromkeys(key for member in members for key in member.config)
    differing = [
        key
        for key in keys
        if key not in NAMES_OF_A_RUN
        and not key.startswith("runner.code_files")
        and len({member.config.get(key) for member in members}) > 1
    ]
    axes = sorted(differing, key=lambda key: key in SEEDS)
    for member in members:
        member.values.update({key: member.config.get(key, "–") for key in axes})
    return axes, members


def group_by_setting(axes: Sequence[str], members: Sequence[Member]) -> list[Setting]:
    """Return the settings, the best first: by mean of the best validations, else of the last
    rewards."""
    settings = [axis for axis in axes if axis not in SEEDS]
    groups: dict[tuple[str, ...], list[Member]] = {}
    for member in members:
        values = tuple(member.values.get(axis, "–") for axis in settings)
        groups.setdefault(values, []).append(member)
    short = _short_names(settings)
    ranked = [
        Setting(
            values,
            tuple(group),
            ", ".join(
                f"{short[axis]} {value}" for axis, value in zip(settings, values, strict=True)
            )
            or "all seeds",
        )
        for values, group in groups.items()
    ]

    def rank(setting: Setting) -> float:
        figure = setting.best_accuracy or setting.last("reward/mean")
        return -figure["mean"] if figure else float("inf")

    return sorted(ranked, key=rank)


def _member(run_dir: Path, values: Mapping[str, str]) -> Member:
    try:
        text = (run_dir / "config.yaml").read_text(encoding="utf-8")
        config = flatten(yaml.load(text, _LOADER))  # noqa: S506  # a safe loader
    except (OSError, ValueError, yaml.YAMLError):
        config = {}
    metrics = read_metrics(run_dir, []) if (run_dir / "metrics.jsonl").exists() else []
    return Member(run_dir.name, dict(values), config, metrics, read_status(run_dir))


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key; the whole key where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def _curves(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Return the charts: title, and for each setting the steps and the values of each seed."""
    charts = []
    for metric, title in CHARTS.items():
        lines = []
        for number, setting in enumerate(settings):
            columns = [member.column(metric) for member in setting.members]
            steps = sorted({step for column_steps, _ in columns for step in column_steps})
            stride = -(-len(steps) // MAX_POINTS) or 1
            steps = [*steps[::stride], *(steps[-1:] if (len(steps) - 1) % stride else [])]
            by_step = [dict(zip(*column, strict=True)) for column in columns]
            seeds = [[values.get(step) for step in steps] for values in by_step]
            if steps:
                line = {"setting": number, "label": setting.label, "steps": steps, "seeds": seeds}
                lines.append(line)
        if lines:
            charts.append({"metric": metric, "title": title, "lines": lines})
    return charts


def _render(
    folder: Path,
    axes: Sequence[str],
    members: Sequence[Member],
    settings: Sequence[Setting],
    differing: Mapping[str, Sequence[str]],
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    style = "\n".join(map(asset, ("uPlot.min.css", "report.css")))
    script = "\n".join(map(asset, ("charts.js", "sweep.js")))
    plot_script = asset(PLOT_SCRIPT)
    # Within a script element "<" could end it.
    data = json.dumps(_curves(settings), allow_nan=False).replace("<", "\\u003c")
    return environment.get_template("sweep.html.jinja").render(
        name=folder.resolve().name,
        settings=settings,
        setting_axes=[axis for axis in axes if axis not in SEEDS],
        axes=axes,
        members=members,
        differing=differing,
        standard_error=standard_error,
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src "
        f"{script_hash(style)}; script-src {script_hash(plot_script)} {script_hash(script)}",
        style=style,
        plot_script=plot_script,
        script=script,
        data=data,
    )
