"""The runs of a sweep: the product of the values that its overrides list, in Hydra's grammar.

`runner.seed=1,2`, `range(1, 4)` and `choice(a, b)` list values. Settings are combined with every
seed. The first seed of all settings comes before the second one of any, so that a sweep that is cut
short compares settings all the same. With `--trials N` settings are not listed but searched
(`search.py`): a search has no runs before its study asks for trials (`study.py`).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlinf_vl.config import Config
from rlinf_vl.config.load import load_config, parse_config
from rlinf_vl.config.sweeps import SEEDS, SWEEP_FILE
from rlinf_vl.config.validate import Rule
from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.sweep.search import (
    OBJECTIVE,
    Dimension,
    Search,
    interval_of,
    translate_sweeper,
)

#: Keys that a sweep sets itself.
OWN_KEYS = ("runner.output_dir", "runner.experiment_name", "runner.resume_dir")
#: Most characters of a run's name; a hash ends a longer one.
NAME_LENGTH = 120


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: of its folder.
        values: key → value, as an override has it.
        trial: the number of its trial in a search.
    """

    name: str
    values: dict[str, str]
    trial: int | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep.

    Attributes:
        config: its name, as the user gave it.
        fixed: overrides that all runs have.
        axes: key → values, settings first, then seeds. A searched interval is one text.
        folder: has the folders of the runs.
        runs: all runs; of a search none.
        search: None where all combinations are run.
    """

    config: str
    fixed: tuple[str, ...]
    axes: dict[str, tuple[str, ...]]
    folder: Path
    runs: tuple[SweepRun, ...]
    search: Search | None = None

    def overrides(self, run: SweepRun) -> list[str]:
        """Return the overrides of a run, which goes on where it has a checkpoint."""
        folder, name = _quoted(str(self.folder)), _quoted(run.name)
        return [
            *self.fixed,
            *(f"{key}={value}" for key, value in run.values.items()),
            f"runner.output_dir={folder}",
            f"runner.experiment_name={name}",
            "runner.resume_dir=auto",
        ]

    def run_dir(self, run: SweepRun) -> Path:
        return self.folder / run.name

    def is_done(self, run: SweepRun) -> bool:
        """Return whether a run has ended with its last step."""
        return read_status(self.run_dir(run)).get("state") == "done"

    @property
    def checked_runs(self) -> tuple[SweepRun, ...]:
        """The runs whose configs are checked: all, or in a search some of its space."""
        if self.search is None:
            return self.runs
        seeds = {key: values[0] for key, values in self.seed_axes.items()}
        labels = _labels(list(self.search.dimensions))
        return tuple(
            SweepRun(_name(labels, values), values | seeds) for values in self.search.probes()
        )

    @property
    def seed_axes(self) -> dict[str, tuple[str, ...]]:
        return {key: values for key, values in self.axes.items() if key in SEEDS}

    def trial_runs(self, number: int, values: dict[str, str]) -> list[SweepRun]:
        """Return the runs of a trial: one for each combination of seeds."""
        name = f"trial-{number:03d}"
        if not self.seed_axes:
            return [SweepRun(name, values, number)]
        return [
            SweepRun(f"{name}_{run.name}", values | run.values, number)
            for run in _runs(self.seed_axes)
        ]

    @property
    def size(self) -> str:
        """The number of runs, in words."""
        if self.search is None:
            return f"{len(self.runs)} runs"
        return f"{self.search.n_trials} trials, {len(self.trial_runs(0, {}))} runs each"

    @property
    def content(self) -> dict[str, Any]:
        """The content of `sweep.json`, for a search without its trials."""
        runs = [{"name": run.name, "values": run.values} for run in self.runs]
        search = {} if self.search is None else {"objective": self.search.objective}
        return {
            "config": self.config,
            "fixed": list(self.fixed),
            "axes": {key: list(values) for key, values in self.axes.items()},
            **search,
            "runs": runs,
        }


def plan_sweep(
    config: str,
    overrides: Sequence[str],
    n_trials: int | None = None,
    objective: str | None = None,
) -> Sweep:
    """Return the sweep of these overrides. Its folder is that of a run of this config.

    Args:
        n_trials: of a search; None runs all combinations.
        objective: metric of a search, by default `OBJECTIVE`.

    Raises:
        ConfigError: no override lists values, an interval without trials.
    """
    overrides, sweeper_trials = translate_sweeper(overrides)
    n_trials = sweeper_trials if n_trials is None else n_trials
    if n_trials is not None and n_trials < 1:
        raise ConfigError(f"--trials {n_trials}: give a number from 1 on")
    if n_trials is None and objective is not None:
        raise ConfigError(f"--objective {objective}: is for a search; give --trials N, too")
    fixed, axes = list[str](), dict[str, tuple[str, ...]]()
    intervals = dict[str, Dimension]()
    for text in overrides:
        override = _parsed(text)
        if override is None or not override.is_sweep_override():
            fixed.append(text)
            continue
        key = override.key_or_group
        if key in OWN_KEYS:
            raise ConfigError(
                f"override {text!r}: a sweep names the folders of its runs itself; give "
                f"{key} one value"
            )
        if override.is_interval_sweep():
            _check_interval_key(text, key, n_trials)
            intervals[key] = interval_of(override)
            axes[key] = intervals[key].content
        else:
            axes[key] = tuple(map(str, override.sweep_string_iterator()))
    if not axes:
        raise ConfigError(
            "--multirun: no override lists values; give some, such as actor.optim.lr=1e-4,3e-4 or "
            "runner.seed=1,2,3"
        )
    axes = {key: axes[key] for key in sorted(axes, key=lambda key: key in SEEDS)}
    named = [text for text in fixed if text.partition("=")[0] == "runner.resume_dir"]
    if named:
        raise ConfigError(
            f"override {named[0]!r}: a sweep resumes its runs itself: the same command again goes "
            "on; leave it out"
        )
    if n_trials is None:
        runs, dimensions = _runs(axes), dict[str, Dimension]()
        first_values = runs[0].values
    else:
        dimensions = {
            key: intervals.get(key) or Dimension(choices=_distinct(key, values))
            for key, values in axes.items()
            if key not in SEEDS
        }
        runs = ()
        first_values = {
            key: dimensions[key].probe_values[0] if key in dimensions else values[0]
            for key, values in axes.items()
        }
    first = parse_config(config, [*fixed, *(f"{k}={v}" for k, v in first_values.items())])
    folder = run_folder(first)
    # The folder is the sweep's; its runs have names of their own.
    fixed = [text for text in fixed if text.partition("=")[0] not in OWN_KEYS]
    search = None
    if n_trials is not None:
        search = _search(first, dimensions, n_trials, objective or OBJECTIVE)
    return Sweep(config, tuple(fixed), axes, folder, runs, search)


def _check_interval_key(text: str, key: str, n_trials: int | None) -> None:
    """Raise ConfigError if an interval has no search, or would search a seed."""
    if key in SEEDS:
        raise ConfigError(
            f"override {text!r}: seeds are repetitions of a trial and are not searched; list them, "
            f"such as {key}=1,2"
        )
    if n_trials is None:
        raise ConfigError(
            f"override {text!r}: an interval is searched, which takes a number of trials: add "
            "--trials 20, or list values, such as actor.optim.lr=1e-4,3e-4"
        )


def _search(
    config: Config, dimensions: dict[str, Dimension], n_trials: int, objective: str
) -> Search:
    """Return the search, whose sampler has the seed of the first run."""
    if not dimensions:
        raise ConfigError(
            "--trials: no override but seeds lists values; give some, such as "
            "'actor.optim.lr=tag(log, interval(1e-5, 1e-3))'"
        )
    validates = config.runner.val_check_interval > 0 and config.data.val_data_paths
    if objective.startswith("val/") and not validates:
        raise ConfigError(
            f"--trials: trials are judged by {objective}, and these runs do not validate; set "
            "runner.val_check_interval and data.val_data_paths, or another metric: "
            "--objective reward/mean"
        )
    return Search(dimensions, n_trials, objective, config.runner.seed)


def _distinct(key: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values, or raise ConfigError if one is there twice."""
    if len(set(values)) < len(values):
        raise ConfigError(f"--trials: {key} has a value twice; list each value once")
    return values


def check_sweep(sweep: Sweep, rules: Sequence[Rule]) -> None:
    """Check the config of every run, and that the folder has no other sweep.

    Raises:
        ConfigError: with every problem found, each once.
    """
    if (sweep.folder / "config.yaml").exists():
        raise ConfigError(
            f"{sweep.folder}: is the folder of a run; give the sweep another name: "
            "runner.experiment_name=NAME"
        )
    file = sweep.folder / SWEEP_FILE
    if file.exists():
        former = json.loads(file.read_text(encoding="utf-8"))
        for key in ("config", "fixed", "axes", "objective"):
            former_value, value = former.get(key), sweep.content.get(key)
            if former_value != value:
                raise ConfigError(
                    f"{sweep.folder}: has a sweep with {key} {json.dumps(former_value)}, and this "
                    f"one has {json.dumps(value)}. Repeat the former command to go on with "
                    "it, or give this sweep another name: runner.experiment_name=NAME"
                )
    problems: dict[str, str] = {}
    for run in sweep.checked_runs:
        try:
            load_config(sweep.config, sweep.overrides(run), rules)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, run.name)
    if problems:
        raise ConfigError(*(f"run {name}: {problem}" for problem, name in problems.items()))


def write_sweep(sweep: Sweep, trials: dict[str, Any] | None = None) -> None:
    """Write `sweep.json`.

    Args:
        trials: of a search, what its study adds: its trials and their runs.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    content = sweep.content | (trials or {})
    with write_aside(sweep.folder / SWEEP_FILE) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _parsed(text: str) -> Override | None:
    """Return the override; None if it can't be read, which loading a config reports."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _runs(axes: dict[str, tuple[str, ...]]) -> tuple[SweepRun, ...]:
    """Return the runs, those of the first seed first; names have settings first, then seeds."""
    labels = _labels(list(axes))
    seeds = [key for key in axes if key in SEEDS]
    settings = [key for key in axes if key not in SEEDS]
    runs = []
    for chosen in product(*(axes[key] for key in [*seeds, *settings])):
        by_key = dict(zip([*seeds, *settings], chosen, strict=True))
        values = {key: by_key[key] for key in axes}
        runs.append(SweepRun(_name(labels, values), values))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--multirun: two runs would be called {twice}; list each value once")
    return tuple(runs)


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each key that no other key of the sweep has."""
    labels = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        other_keys = [f".{other_key}" for other_key in keys if other_key != key]
        for end in ends:
            labels[key] = end
            if not any(other_key.endswith(f".{end}") for other_key in other_keys):
                break
    return labels


def _name(labels: dict[str, str], values: dict[str, str]) -> str:
    """Return the name of the run with these values."""
    cells = []
    for key, value in values.items():
        slug = re.sub(r"[^\w.+-]+", "-", value.strip("[]'\"")) or "empty"
        cells.append(f"{labels[key]}-{slug}")
    name = "_".join(cells)
    if len(name) <= NAME_LENGTH:
        return name
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
    return f"{name[: NAME_LENGTH - 9]}-{digest}"


def _quoted(value: str) -> str:
    """Return a text as an override's value."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
