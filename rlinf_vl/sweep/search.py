"""The search space of `train --multirun --trials N`, in the grammar of Hydra's sweepers.

`interval(1e-5, 1e-3)` is searched between its ends, both included; `int(interval(4, 16))` in whole
numbers, `tag(log, …)` on a logarithmic scale. Lists of values are categories. Nothing here imports
Optuna, which is an extra of the package: `study.py` does.
"""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import IntervalSweep, Override

from rlinf_vl.errors import ConfigError

#: The metric of a trial unless `--objective` names another one.
OBJECTIVE = "val/accuracy"
#: Keys of hydra-optuna-sweeper that say what a search does here in any case.
SWEEPER_DEFAULTS = (("hydra/sweeper", "optuna"), ("hydra.sweeper.direction", "maximize"))
INSTALL = "pip install 'rlinf_vl[search]'"
#: Where a config is checked within an interval, beside its ends: at no round number, so that an
#: interval of floats for a key of whole numbers is refused.
_INNER_POINT = 0.381966


@dataclass(frozen=True, slots=True)
class Dimension:
    """The values of one key that a search tries: categories, or the numbers of an interval.

    Attributes:
        choices: values as an override has them; empty for an interval.
        low, high: ends of the interval, both included.
        is_int: whether the interval has whole numbers only.
        is_log: whether it is searched on a logarithmic scale.
    """

    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_int: bool = False
    is_log: bool = False

    @property
    def content(self) -> tuple[str, ...]:
        """The values in `sweep.json`: the choices, or the interval as text."""
        if self.choices:
            return self.choices
        text = f"interval({self.text_of(self.low)}, {self.text_of(self.high)})"
        text = f"int({text})" if self.is_int else text
        return (f"tag(log, {text})" if self.is_log else text,)

    @property
    def probe_values(self) -> tuple[str, ...]:
        """Values whose configs are checked before the first trial."""
        if self.choices:
            return self.choices
        inner = self.low + _INNER_POINT * (self.high - self.low)
        return tuple(map(self.text_of, (self.low, inner, self.high)))

    def text_of(self, value: float | str) -> str:
        """Return a value as an override has it."""
        if isinstance(value, str):
            return value
        return str(round(value)) if self.is_int else repr(float(value))


@dataclass(frozen=True, slots=True)
class Search:
    """A search over dimensions, in trials.

    Attributes:
        dimensions: searched key → its dimension.
        n_trials: trials in all, those of former commands included.
        objective: metric whose highest value a trial is judged by.
        seed: of the sampler.
    """

    dimensions: dict[str, Dimension]
    n_trials: int
    objective: str
    seed: int

    def probes(self) -> list[dict[str, str]]:
        """Return values to check configs with: each of every dimension's own, the other keys at
        their first."""
        first = {key: dimension.probe_values[0] for key, dimension in self.dimensions.items()}
        further = [
            first | {key: value}
            for key, dimension in self.dimensions.items()
            for value in dimension.probe_values[1:]
        ]
        return [first, *further]


def require_optuna() -> None:
    """Raise ConfigError if there is no Optuna to search with."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(f"--trials: a search needs optuna, which is not installed; {INSTALL}")


def interval_of(override: Override) -> Dimension:
    """Return the dimension of an override that has an interval.

    Raises:
        ConfigError: the interval is empty or has no logarithm, or its tag is unknown.
    """
    interval = override.value()
    assert isinstance(interval, IntervalSweep)
    low, high = interval.start or 0, interval.end or 0
    is_log = "log" in interval.tags
    reason = ""
    if unknown_tags := sorted(interval.tags - {"log"}):
        reason = f"the tag {unknown_tags[0]} says nothing here; log is the only one that does"
    elif not (math.isfinite(low) and math.isfinite(high)):
        reason = "an interval has finite ends"
    elif low >= high:
        reason = f"an interval begins below its end, and {low} is not below {high}"
    elif is_log and low <= 0:
        reason = "an interval with tag(log, …) begins above 0"
    if reason:
        raise ConfigError(f"override {override.input_line!r}: {reason}")
    return Dimension(low=low, high=high, is_int=isinstance(low, int), is_log=is_log)


def translate_sweeper(overrides: Sequence[str]) -> tuple[list[str], int | None]:
    """Take the keys of hydra-optuna-sweeper out of overrides.

    Returns:
        The other overrides, and hydra.sweeper.n_trials if it is among them.

    Raises:
        ConfigError: a key of Hydra's that has no counterpart here.
    """
    other_overrides, n_trials = list[str](), None
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if not key.startswith(("hydra/", "hydra.")):
            other_overrides.append(text)
        elif key == "hydra.sweeper.n_trials" and value.isdecimal():
            n_trials = int(value)
        elif (key, value) not in SWEEPER_DEFAULTS:
            raise ConfigError(
                f"override {text!r}: rlinf-vl does without Hydra's sweepers and launchers. A search "
                "is `--trials N`, with `--objective METRIC`, which is maximized, and `--parallel N` "
                "(docs/tuning.md)"
            )
    return other_overrides, n_trials
