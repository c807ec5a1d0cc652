"""Which rows of each split a run uses, in which order, and how many training steps they make."""

import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlinf_vl.config.schema import Config
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.pool import RolloutPool

log = logging.getLogger(__name__)

#: Rows that are too long and are named.
SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True)
class RunData:
    """The rows of a run. `answers` counts the reference answers of the validation rows, `overlong` the training rows whose prompts
    are beyond data.max_prompt_length."""

    sampler: EpochSampler
    val_rows: list[int]
    answers: Counter[str]
    total_steps: int
    bad_rows: BadRows
    overlong: int = 0


def find_usable_rows(config: Config, run_dir: Path, pool: RolloutPool, progress: RunProgress) -> RunData:
    """Wait for the workers, and let them check the rows of each split. Bad rows are left out, and recorded in `run_dir`.

    Raises:
        ConfigError: too few rows are left. TooManyBadRows: too many are bad.
    """
    data, runner = config.data, config.runner
    rows = {"val": 0} | pool.start()
    val = rows["val"] if data.val_samples < 0 else min(data.val_samples, rows["val"])
    totals = {"train": rows["train"], "val": val}
    bad_rows = BadRows(run_dir, data.max_bad_rows, totals)
    found = {split: check_rows(config, split, n, pool, bad_rows, progress) for split, n in totals.items()}
    kept = {split: result.kept for split, result in found.items()}
    sampler = EpochSampler(list(kept["train"]), data.rollout_batch_size, shuffle=data.shuffle, seed=data.seed)
    steps = sampler.batches_per_epoch * runner.max_epochs
    total_steps = steps if runner.max_steps < 0 else min(steps, runner.max_steps)
    answers = Counter(map(str.strip, kept["val"].values()))
    overlong = len(found["train"].too_long) + len(found["train"].cut)
    return RunData(sampler, list(kept["val"]), answers, total_steps, bad_rows, overlong)


def check_rows(
    config: Config, split: str, n: int, pool: RolloutPool, bad_rows: BadRows, progress: RunProgress
) -> FilterResult:
    """Which of the first `n` rows of a split can be used; raises as `find_usable_rows`."""
    result = pool.filter_rows(split, range(n), partial(progress.phase, f"checking rows of {split}", total=n))
    bad, longest = result.bad, config.data.max_prompt_length
    log.info("%s: %d rows, %s, %d bad", split, n, _overlong(result, longest), len(bad))
    if result.too_long and config.data.overlong == "error":
        raise ConfigError(
            f"data.overlong: error, and in data.{split}_data_paths {_overlong(result, longest)}; raise data.max_prompt_length (and "
            "runner.seq_length), or set data.overlong to drop or cut"
        )
    if bad:
        bad_rows.add(split, bad.values())
        log.warning("bad rows of %s, left out (%s):\n%s", split, bad_rows.path, bad_rows.table(split))
        bad_rows.check()
    if len(result.kept) < (config.data.rollout_batch_size if split == "train" else min(n, 1)):
        raise ConfigError(_too_few(config, split, n, result, bad_rows.path.name))
    return result


def _overlong(result: FilterResult, longest: int) -> str:
    """How many prompts are too long, what becomes of them, and the first of them."""
    tokens = result.too_long | {row: n for row, (n, _) in result.cut.items()}
    if not tokens:
        return f"none longer than data.max_prompt_length={longest}"
    first = ", ".join(f"row {row} has {tokens[row]} tokens" for row in sorted(tokens)[:SHOWN_ROWS])
    lost = [row for row, (_, images) in result.cut.items() if images]
    cut = f" and cut to it, {len(lost)} of them without some of their images" if result.cut else ""
    more = f", and {len(tokens) - SHOWN_ROWS} more" if len(tokens) > SHOWN_ROWS else ""
    return f"{len(tokens)} longer than data.max_prompt_length={longest}{cut} ({first}{more})"


def _too_few(config: Config, split: str, n: int, result: FilterResult, bad_file: str) -> str:
    why = [f"{len(result.bad)} are bad (see {bad_file})"] if result.bad else []
    if result.too_long:
        tokens = sorted(result.too_long.values())
        why.append(
            f"{len(tokens)} have prompts of {tokens[0]} to {tokens[-1]} tokens, above "
            f"data.max_prompt_length={config.data.max_prompt_length}: raise that, and runner.seq_length, or set data.overlong=cut"
        )
    short, lower = "nothing could be validated", ""
    if split == "train":
        short = f"data.rollout_batch_size={config.data.rollout_batch_size} needs more"
        lower = "; or lower data.rollout_batch_size" if result.kept else ""
    return (
        f"data.{split}_data_paths: of {n} rows {len(result.kept)} can be used; {short}. "
        f"{'; '.join(why) or 'There are no more'}{lower}"
    )
