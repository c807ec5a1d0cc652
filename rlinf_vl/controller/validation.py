"""Validations, and the lines of metrics that wait for them. With `runner.schedule: sync` the loop
waits for a validation; with the others it runs beside the next step's training, on weights that
stay as they are until it has ended."""

import logging
from collections.abc import Mapping, Sequence

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.batch import check_errors, count_bad_rows
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.protocols import Pool
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.tasks import make_tasks, store_only
from rlinf_vl.controller.vision_controls import ControlRun
from rlinf_vl.errors import RunError, nearest
from rlinf_vl.observe.metrics import env_metrics, part_metrics
from rlinf_vl.observe.seeing import (
    control_counts,
    first_shares,
    right_shares,
    seeing_metrics,
    shares_by_control,
)
from rlinf_vl.observe.sets import val_set_metrics
from rlinf_vl.rollout.submission import Submission
from rlinf_vl.types import GroupSummary

logger = logging.getLogger(__name__)


class Validator:
    """The validations of a run: accuracy on the validation rows, one sample each, from the same
    random streams every time.

    Per step: `begin` where one is due, `end_step`, and `finish` before engines get other weights.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        data: DatasetPlan,
        log: RunLog,
        accuracies: dict[int, float],
        first_shares: dict[str, dict[int, list[float]]] | None = None,
    ) -> None:
        """
        Args:
            accuracies: gets the value of `runner.best_metric` of each validation, by step.
            first_shares: as `first` in `seeing_metrics`; filled by the first validation.
        """
        self._config = config
        self._pool = pool
        self._data = data
        self._log = log
        self._accuracies = accuracies
        self._first_shares = {} if first_shares is None else first_shares
        self._step = 0
        #: The groups of the validation that is running, its vision controls, the numbers of the
        #: groups that are recorded, and the metrics of its step, if that has ended.
        self._submission: Submission | None = None
        self._controls: ControlRun | None = None
        self._recorded: list[int] = []
        self._step_metrics: Mapping[str, float] = {}

    @property
    def running(self) -> bool:
        return self._submission is not None

    def is_due(self, step: int) -> bool:
        """Return whether this step's weights are to be validated. If so, engines must get them."""
        return bool(self._data.val_rows) and self._data.is_due(
            self._config.runner.val_check_interval, step
        )

    def begin(self, step: int) -> dict[str, float]:
        """Begin to validate the engines' weights, which are those of this step. Returns the metrics
        if the loop waits for them, else {}."""
        runner = self._config.runner
        if not self._data.val_rows or runner.val_check_interval < 0:
            return {}
        self._step = step
        tasks = make_tasks("val", self._data.val_rows, 1, runner.seed, step)
        self._recorded = self._log.recorder.choose("val", step, len(tasks))
        self._submission = self._pool.submit(store_only(tasks, self._recorded))
        # Behind the questions as they are, whose batches stay what they would be without.
        self._controls = ControlRun(self._pool, tasks, self._data.controls)
        # After the last step there is no training beside which the validation could run.
        waits = not runner.generates_ahead or step == self._data.total_steps
        return self._end(self._submission) if waits else {}

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step's metrics, if there are any: at once, or when its validation has ended."""
        if self.running:
            self._step_metrics = metrics
        elif metrics:
            self._pool.release(self._log.end_step(step, metrics))

    def finish(self) -> None:
        """Wait for the validation that is running, and log its step."""
        if self._submission is not None:
            val_metrics = self._end(self._submission)
            # The timings are those of the step being trained, but this wait belongs to the
            # validated step. It is the wait alone: most of the validation ran beside the training.
            val_metrics["time/validate"] = self._log.timings["time/validate"]
            del self._log.timings["time/validate"]
            step_metrics, self._step_metrics = self._step_metrics, {}
            self._pool.release(self._log.end_step(self._step, {**step_metrics, **val_metrics}))

    def give_up(self) -> None:
        """Abandon the validation that is running, and log its step without it."""
        self.close()
        if self._step_metrics:
            self._pool.release(self._log.end_step(self._step, self._step_metrics))

    def close(self) -> None:
        """Abandon the validation that is running."""
        for running in (self._submission, self._controls):
            if running is not None:
                running.close()
        self._submission = self._controls = None

    def _end(self, submission: Submission) -> dict[str, float]:
        """Wait for the groups, and return their metrics."""
        log, step = self._log, self._step
        with log.timed("validate"):
            results = submission.results()
            controls = {} if self._controls is None else self._controls.results()
        self._submission = self._controls = None
        summaries = [summary for summary, _ in results]
        groups = [group for _, group in results]
        # What it returns is not released: groups that are not recorded were not stored.
        log.recorder.record("val", step, summaries, groups, self._recorded)
        check_errors(summaries, log)
        count_bad_rows("val", summaries, self._data, step)
        # A failed answer is a wrong one: left out, it would favour what survives, such as short
        # episodes.
        trajectories = [trajectory for s in summaries for trajectory in s.trajectories]
        n_problems = len(trajectories)
        n_errors = sum(t.error is not None for t in trajectories)
        n_right = sum(t.correct for t in trajectories)
        lengths = [t.response_tokens for t in trajectories]
        accuracy = n_right / max(1, n_problems)
        logger.info(
            "step %d: val/accuracy %.3f on %d problems, %d failed",
            step,
            accuracy,
            n_problems,
            n_errors,
        )
        other_metrics = env_metrics(summaries) | part_metrics(summaries)
        metrics: dict[str, float] = (
            self._seeing(summaries, controls)
            | val_set_metrics(summaries, self._config.data.val_group_by)
            | {"val/" + name: value for name, value in other_metrics.items()}
            | {
                "val/accuracy": accuracy,
                "val/accuracy_answered": n_right / max(1, n_problems - n_errors),
                "val/problems": n_problems,
                "val/errors": n_errors,
                "val/ungradable": sum(t.ungradable for t in trajectories),
                "val/response_length_mean": sum(lengths) / max(1, len(lengths)),
            }
        )
        self._accuracies[step] = self._best_value(metrics)
        return metrics

    def _best_value(self, metrics: Mapping[str, float]) -> float:
        """Return the metric by which `runner.keep_best` chooses; RunError: there is none."""
        name = self._config.runner.best_metric
        if name not in metrics:
            raise RunError(
                f"runner.best_metric: {name!r} is no metric of the validation at step "
                f"{self._step}; there are {', '.join(sorted(metrics))};"
                f"{nearest(name, metrics)}".rstrip(";")
            )
        return metrics[name]

    def _seeing(
        self, summaries: Sequence[GroupSummary], controls: Mapping[str, Mapping[int, GroupSummary]]
    ) -> dict[str, float]:
        """Return the metrics of the vision controls, if there are any."""
        if not controls:
            return {}
        true = right_shares(self._data.val_rows, summaries)
        by_control = shares_by_control(controls)
        for kind, shares in by_control.items():
            if kind not in self._first_shares:
                self._first_shares[kind] = first_shares(true, shares)
        counts = control_counts(s for by_row in controls.values() for s in by_row.values())
        if n_env_images := counts["val/control_env_images"]:
            logger.warning(
                "step %d: data.vision_controls: environments showed %d images of their own, which "
                "no control replaces",
                self._step,
                n_env_images,
            )
        return seeing_metrics(true, by_control, self._first_shares) | counts
