"""The study of a search: asks Optuna for trials, and tells it how they went.

The journal in the sweep's folder has every trial as soon as it is asked, so that a search that is
killed goes on with the same trials. A trial is one run for each seed. Its value is the mean over
the seeds of the highest value that each run logged of the objective.
"""

import logging
import statistics
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from rlinf_vl.report.run_files import read_metrics
from rlinf_vl.sweep.plan import Sweep, SweepRun, write_sweep
from rlinf_vl.sweep.search import Dimension, Search

log = logging.getLogger(__name__)

#: The journal's name in the sweep's folder, and the study's name in the journal.
JOURNAL_FILE = "study.log"
STUDY_NAME = "sweep"
#: Optuna's states in `sweep.json`.
_STATES = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
}


class Study:
    """The runs of a search as a queue: a trial is asked for when no run of another one waits.

    Attributes:
        n_left: runs that were left when the study was opened.
    """

    def __init__(self, sweep: Sweep, search: Search) -> None:
        """Open the study in the sweep's folder, or begin it."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._search = sweep, search
        storage = JournalStorage(JournalFileBackend(str(sweep.folder / JOURNAL_FILE)))
        self._study = optuna.create_study(
            storage=storage, study_name=STUDY_NAME, direction="maximize", load_if_exists=True
        )
        self._waiting = list[SweepRun]()
        # Trial → its runs that have not ended, those that wait included.
        self._open_runs = dict[int, list[SweepRun]]()
        n_seeds = len(sweep.trial_runs(0, {}))
        self.n_left = n_seeds * max(0, search.n_trials - len(self.trials()))
        self._resume()
        self.n_left += len(self._waiting)

    def trials(self) -> list[FrozenTrial]:
        """Return the trials whose values are all drawn.

        A process that is killed while it asks leaves one whose values are not.
        """
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.params.keys() == self._search.dimensions.keys()]

    def next_run(self) -> SweepRun | None:
        """Return a run to start; None if all are started or done."""
        if not self._waiting and len(self.trials()) < self._search.n_trials:
            self._ask()
        return self._waiting.pop(0) if self._waiting else None

    def record_end(self, run: SweepRun, is_failed: bool) -> None:
        """Note that a run has ended, and tell Optuna if it was the last one of its trial.

        After a run that failed the trial has no value, so its further seeds are not run.
        """
        assert run.trial is not None
        open_runs = self._open_runs[run.trial]
        open_runs.remove(run)
        if is_failed:
            dropped_runs = [waiting for waiting in self._waiting if waiting.trial == run.trial]
            for dropped_run in dropped_runs:
                self._waiting.remove(dropped_run)
                open_runs.remove(dropped_run)
        if not open_runs:
            self._tell(run.trial)

    def summary(self) -> str:
        """Return a sentence about the trials and the best one."""
        complete = [trial for trial in self.trials() if trial.state == TrialState.COMPLETE]
        text = f"{len(complete)} of {self._search.n_trials} trials are complete"
        if not complete:
            return text
        best_trial = self._study.best_trial
        values = " ".join(f"{key}={value}" for key, value in self._values(best_trial).items())
        return (
            f"{text}; the best is trial {best_trial.number} with {self._search.objective} "
            f"{best_trial.value:.4f}: {values}"
        )

    def _resume(self) -> None:
        """Queue the runs of trials under way that are not done; tell of those that are."""
        numbers = {trial.number for trial in self.trials()}
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            if trial.number not in numbers:
                self._study.tell(trial.number, state=TrialState.FAIL)
                continue
            runs = self._sweep.trial_runs(trial.number, self._values(trial))
            self._open_runs[trial.number] = [run for run in runs if not self._sweep.is_done(run)]
            self._waiting += self._open_runs[trial.number]
            if not self._open_runs[trial.number]:
                self._tell(trial.number)
        self._write()

    def _ask(self) -> None:
        # A sampler of its own for each trial: one that is made anew after a kill would otherwise
        # repeat the first trials' random numbers.
        number = len(self._study.get_trials(deepcopy=False))
        words = np.random.SeedSequence([self._search.seed, number]).generate_state(1)
        self._study.sampler = optuna.samplers.TPESampler(seed=int(words[0]))
        trial = self._study.ask(
            {key: _distribution(one) for key, one in self._search.dimensions.items()}
        )
        values = {
            key: one.text_of(trial.params[key]) for key, one in self._search.dimensions.items()
        }
        runs = self._sweep.trial_runs(trial.number, values)
        self._open_runs[trial.number] = list(runs)
        self._waiting += runs
        log.info(
            "trial %d: %s", trial.number, " ".join(f"{key}={text}" for key, text in values.items())
        )
        self._write()

    def _tell(self, number: int) -> None:
        """Tell Optuna the trial's value, or that it failed."""
        trial = next(trial for trial in self.trials() if trial.number == number)
        runs = self._sweep.trial_runs(number, self._values(trial))
        is_complete = all(map(self._sweep.is_done, runs))
        values = [best_value(self._sweep.run_dir(run), self._search.objective) for run in runs]
        logged_values = [value for value in values if value is not None]
        if is_complete and len(logged_values) == len(runs):
            value = statistics.fmean(logged_values)
            self._study.tell(number, value)
            log.info("trial %d: %s %.4f", number, self._search.objective, value)
        else:
            self._study.tell(number, state=TrialState.FAIL)
            reason = f"no {self._search.objective} was logged" if is_complete else "a run failed"
            log.error("trial %d failed: %s", number, reason)
        self._write()

    def _write(self) -> None:
        """Write `sweep.json` with the trials so far."""
        records, runs = list[dict[str, object]](), list[dict[str, object]]()
        for trial in self.trials():
            values = self._values(trial)
            state = _STATES.get(trial.state, "running")
            records.append(
                {"trial": trial.number, "state": state, "objective": trial.value, "values": values}
            )
            for run in self._sweep.trial_runs(trial.number, values):
                runs.append({"name": run.name, "trial": trial.number, "values": run.values})
        content = {"n_trials": self._search.n_trials, "trials": records, "runs": runs}
        write_sweep(self._sweep, content)

    def _values(self, trial: FrozenTrial) -> dict[str, str]:
        dimensions = self._search.dimensions
        return {key: one.text_of(trial.params[key]) for key, one in dimensions.items()}


def best_value(run_dir: Path, metric: str) -> float | None:
    """Return the highest value of a metric that a run logged, None if there is none.

    The validation before training does not count: it is the same for all trials.
    """
    if not (run_dir / "metrics.jsonl").exists():
        return None
    rows = [row for row in read_metrics(run_dir, []) if (row["step"] or 0) > 0]
    values = [value for row in rows if (value := row.get(metric)) is not None]
    return max(values, default=None)


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.is_int:
        return IntDistribution(round(dimension.low), round(dimension.high), log=dimension.is_log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)
