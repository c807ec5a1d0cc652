"""The runs of a sweep: the product of the values that its overrides list, in Hydra's grammar.

`runner.seed=1,2`, `range(1, 4)` and `choice(a, b)` list values. Settings are combined with every
seed. The first seed of all settings comes before the second one of any, so that a sweep that is cut
short compares settings all the same.
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

from rlinf_vl.config.load import load_config, parse_config
from rlinf_vl.config.sweeps import SEEDS, SWEEP_FILE
from rlinf_vl.config.validate import Rule
from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.runtime.run_folder import run_folder

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
    """

    name: str
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep.

    Attributes:
        config: its name, as the user gave it.
        fixed: overrides that all runs have.
        axes: key → values, settings first, then seeds.
        folder: has the folders of the runs.
        runs: all runs, in their order.
    """

    config: str
    fixed: tuple[str, ...]
    axes: dict[str, tuple[str, ...]]
    folder: Path
    runs: tuple[SweepRun, ...]

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
    def content(self) -> dict[str, Any]:
        """The content of `sweep.json`."""
        runs = [{"name": run.name, "values": run.values} for run in self.runs]
        return {
            "config": self.config,
            "fixed": list(self.fixed),
            "axes": {key: list(values) for key, values in self.axes.items()},
            "runs": runs,
        }


def plan_sweep(config: str, overrides: Sequence[str]) -> Sweep:
    """Return the sweep of these overrides. Its folder is that of a run of this config.

    Raises:
        ConfigError: no override lists values, or one has an interval or a key of Hydra's sweepers.
    """
    _refuse_hydra_keys(overrides)
    fixed, axes = list[str](), dict[str, tuple[str, ...]]()
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
            raise ConfigError(
                f"override {text!r}: a sweep lists values, such as {key}=1e-4,3e-4; an interval is "
                "searched from Python (docs/tuning.md)"
            )
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
    runs = _runs(axes)
    first = parse_config(config, [*fixed, *(f"{k}={v}" for k, v in runs[0].values.items())])
    folder = run_folder(first)
    # The folder is the sweep's; its runs have names of their own.
    fixed = [text for text in fixed if text.partition("=")[0] not in OWN_KEYS]
    return Sweep(config, tuple(fixed), axes, folder, runs)


def _refuse_hydra_keys(overrides: Sequence[str]) -> None:
    """Raise ConfigError if an override is of Hydra's own sweepers and launchers."""
    for text in overrides:
        if text.lstrip("+").startswith(("hydra/", "hydra.")):
            raise ConfigError(
                f"override {text!r}: rlinf-vl does without Hydra's sweepers and launchers; list "
                "values, with --multirun and --parallel N, or search from Python (docs/tuning.md)"
            )


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
        for key in ("config", "fixed", "axes"):
            former_value, value = former.get(key), sweep.content.get(key)
            if former_value != value:
                raise ConfigError(
                    f"{sweep.folder}: has a sweep with {key} {json.dumps(former_value)}, and this "
                    f"one has {json.dumps(value)}. Repeat the former command to go on with "
                    "it, or give this sweep another name: runner.experiment_name=NAME"
                )
    problems: dict[str, str] = {}
    for run in sweep.runs:
        try:
            load_config(sweep.config, sweep.overrides(run), rules)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, run.name)
    if problems:
        raise ConfigError(*(f"run {name}: {problem}" for problem, name in problems.items()))


def write_sweep(sweep: Sweep) -> None:
    """Write `sweep.json`."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with write_aside(sweep.folder / SWEEP_FILE) as aside:
        aside.write_text(json.dumps(sweep.content, indent=1) + "\n", encoding="utf-8")


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
