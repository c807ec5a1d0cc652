"""The rows of each split that a run uses, their order, and the number of training steps."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from rlinf_vl.config.imitation import RowLimit, row_limit
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.protocols import StepProgress
from rlinf_vl.controller.vision_controls import Controls, plan_controls
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.errors import ConfigError

log = logging.getLogger(__name__)

#: Maximum number of rows that a message names, of those that are too long or lack images.
SHOWN_ROWS = 5


class RowChecker(Protocol):
    """A rollout pool, as far as it checks rows."""

    def start(self) -> dict[str, int]: ...
    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None]
    ) -> FilterResult: ...


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """The rows of a run.

    Attributes:
        answers: how many validation rows have each reference answer.
        counts: metrics of the training rows, equal in every step.
        controls: the vision controls of the validation rows.
    """

    sampler: EpochSampler
    val_rows: list[int]
    answers: Counter[str]
    total_steps: int
    bad_rows: BadRows
    counts: dict[str, float] = field(default_factory=dict)
    controls: Controls = field(default_factory=dict)

    def is_due(self, interval: int, step: int) -> bool:
        """Return True after every `interval` steps and after the last one; False if `interval` is
        not positive."""
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


def find_usable_rows(
    config: Config, run_dir: Path, pool: RowChecker, progress: StepProgress
) -> DatasetPlan:
    """Wait for the workers, and let them check the rows of each split. Bad rows are left out, and
    recorded in `run_dir`.

    Raises:
        ConfigError: too few rows are left.
        TooManyBadRows: too many rows are bad.
    """
    data, runner = config.data, config.runner
    rows = {"val": 0} | pool.start()  # without data.val_data_paths, the pool knows no such split
    n_val = rows["val"] if data.val_samples < 0 else min(data.val_samples, rows["val"])
    totals = {"train": rows["train"], "val": n_val}
    bad_rows = BadRows(run_dir, data.max_bad_rows, totals)
    results = {
        split: check_rows(config, split, n, pool, bad_rows, progress) for split, n in totals.items()
    }
    assert data.seed is not None  # loading the config has put runner.seed there
    train, val_answers = results["train"], results["val"].kept
    facts = train.facts
    try:
        sampler = EpochSampler(
            list(train.kept),
            data.rollout_batch_size,
            shuffle=data.shuffle,
            seed=data.seed,
            levels={row: facts[row].level for row in facts} if data.curriculum_key else None,
            sources={row: facts[row].source for row in facts},
            weights=data.weights,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    steps = sampler.batches_per_epoch * runner.max_epochs
    total_steps = steps if runner.max_steps < 0 else min(steps, runner.max_steps)
    answers = Counter(map(str.strip, val_answers.values()))
    counts: dict[str, float] = {"data/overlong_rows": len(train.too_long) + len(train.cut)}
    if data.image_only_mode:
        counts["data/text_only_rows"] = len(train.text_only)
    if data.max_images_per_message or data.max_images_per_sample:
        counts["data/dropped_images"] = sum(row.dropped_images for row in facts.values())
    controls = plan_controls(config, results["val"])
    return DatasetPlan(sampler, list(val_answers), answers, total_steps, bad_rows, counts, controls)


def check_rows(
    config: Config, split: str, n: int, pool: RowChecker, bad_rows: BadRows, progress: StepProgress
) -> FilterResult:
    """Check the first `n` rows of a split; the result says which can be used. Raises as
    `find_usable_rows`."""
    result = pool.filter_rows(
        split, range(n), partial(progress.phase, f"checking rows of {split}", total=n)
    )
    overlong = _overlong(result, row_limit(config))
    log.info("%s: %d rows, %s, %d bad", split, n, overlong, len(result.bad))
    if result.text_only:
        row_ids = ", ".join(list(result.text_only.values())[:SHOWN_ROWS])
        log.info(
            "%s: %d rows without an image are left out (data.image_only_mode): %s, …",
            split,
            len(result.text_only),
            row_ids,
        )
    if dropped := {
        row: facts.dropped_images for row, facts in result.facts.items() if facts.dropped_images
    }:
        log.info(
            "%s: %d images of %d rows are beyond data.max_images_per_*",
            split,
            sum(dropped.values()),
            len(dropped),
        )
    for name, n_rows in result.unused_keys.items():
        log.warning("%s: %r of %d rows is neither used nor passed on", split, name, n_rows)
    if result.too_long and config.data.overlong == "error":
        raise ConfigError(
            f"data.overlong: error, and in data.{split}_data_paths {overlong}; "
            f"{_remedy(config, 'data.overlong to drop or cut', 'data.overlong=drop')}"
        )
    if result.bad:
        bad_rows.add(split, result.bad.values())
        log.warning(
            "bad rows of %s, left out (%s):\n%s", split, bad_rows.path, bad_rows.table(split)
        )
        bad_rows.check()
    # A training step needs a whole batch; a validation, where there is any, one row.
    if len(result.kept) < (config.data.rollout_batch_size if split == "train" else min(n, 1)):
        raise ConfigError(_too_few(config, split, n, result, bad_rows.path.name))
    return result


def _remedy(config: Config, setting: str, setting_of_conversations: str) -> str:
    """Return what to do about rows that are too long."""
    if config.data.messages_key is not None:
        return (
            "raise runner.seq_length (and runner.max_tokens_per_mbs), or set "
            f"{setting_of_conversations}"
        )
    return f"raise data.max_prompt_length (and runner.seq_length), or set {setting}"


def _overlong(result: FilterResult, limit: RowLimit) -> str:
    """Describe the rows that are too long: their number, whether they were cut, and the first
    ones."""
    tokens = result.too_long | {row: n for row, (n, _) in result.cut.items()}
    if not tokens:
        return f"none longer than {limit}"
    first = ", ".join(f"row {row} has {tokens[row]} tokens" for row in sorted(tokens)[:SHOWN_ROWS])
    n_without_images = sum(bool(images) for _, images in result.cut.values())
    cut = (
        f" and cut to it, {n_without_images} of them without some of their images"
        if result.cut
        else ""
    )
    remainder = f", and {len(tokens) - SHOWN_ROWS} more" if len(tokens) > SHOWN_ROWS else ""
    return f"{len(tokens)} longer than {limit}{cut} ({first}{remainder})"


def _too_few(config: Config, split: str, n: int, result: FilterResult, bad_file: str) -> str:
    reasons = [f"{len(result.bad)} are bad (see {bad_file})"] if result.bad else []
    if result.too_long:
        tokens = sorted(result.too_long.values())
        limit, remedy = row_limit(config), ", and runner.seq_length, or set data.overlong=cut"
        if limit.subject == "conversation":
            remedy = ""
        reasons.append(
            f"{len(tokens)} have {limit.subject}s of {tokens[0]} to {tokens[-1]} tokens, above "
            f"{limit}: raise that{remedy}"
        )
    if result.text_only:
        reasons.append(f"{len(result.text_only)} have no image, and data.image_only_mode is true")
    problem, hint = "nothing could be validated", ""
    if split == "train":
        problem = f"data.rollout_batch_size={config.data.rollout_batch_size} needs more"
        hint = "; or lower data.rollout_batch_size" if result.kept else ""
    return (
        f"data.{split}_data_paths: of {n} rows {len(result.kept)} can be used; {problem}. "
        f"{'; '.join(reasons) or 'There are no more'}{hint}"
    )
