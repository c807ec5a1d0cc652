"""Which rows of each split a run uses, in which order, and how many training steps they make."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.errors import ConfigError

log = logging.getLogger(__name__)

#: (split, rows, progress) → which of them can be used; `progress` is called with the number of rows checked so far.
FilterRows = Callable[[str, Sequence[int], Callable[[int], None]], FilterResult]


@dataclass(frozen=True, slots=True)
class RunData:
    """The rows of a run. `answers` counts the reference answers of the validation rows."""

    sampler: EpochSampler
    val_rows: list[int]
    answers: Counter[str]
    total_steps: int
    bad_rows: BadRows


def find_usable_rows(
    run_dir: Path,
    rows: Mapping[str, int],
    filter_rows: FilterRows,
    progress: Callable[[str, int, int], None],
    *,
    val_samples: int,
    batch_size: int,
    max_prompt_length: int,
    max_bad_rows: float,
    shuffle: bool,
    seed: int,
    max_epochs: int,
    max_steps: int,
) -> RunData:
    """Check the rows of each split and leave out those that can't be used; bad ones are recorded in `run_dir`.

    Args:
        rows: split → number of rows; no "val": nothing is validated.
        progress: called with a phase's name, the rows checked so far and all of them.
        val_samples, …: the `data.*` and `runner.*` keys of these names (`batch_size`: data.rollout_batch_size).

    Raises:
        ConfigError: too few rows are left. TooManyBadRows: too many are bad.
    """
    val = rows.get("val", 0) if val_samples < 0 else min(val_samples, rows.get("val", 0))
    totals = {"train": rows["train"], "val": val}
    bad_rows = BadRows(run_dir, max_bad_rows, totals)
    found: dict[str, FilterResult] = {}
    for split, n in totals.items():
        result = filter_rows(
            split, range(n), lambda done, split=split, n=n: progress(f"checking rows of {split}", done, n)
        )
        too_long, bad = len(result.too_long), result.bad
        log.info("%s: %d rows, %d of them longer than data.max_prompt_length, %d bad", split, n, too_long, len(bad))
        if bad:
            bad_rows.add(split, [bad[row] for row in sorted(bad)])
            log.warning("bad rows of %s, left out (%s):\n%s", split, bad_rows.path, bad_rows.table(split))
            bad_rows.check()
        needed = batch_size if split == "train" else min(n, 1)
        if len(result.kept) < needed:
            raise ConfigError(_too_few(split, n, needed, result, bad_rows.path.name, max_prompt_length))
        found[split] = result
    sampler = EpochSampler(list(found["train"].kept), batch_size, shuffle=shuffle, seed=seed)
    steps = sampler.batches_per_epoch * max_epochs
    total_steps = steps if max_steps < 0 else min(steps, max_steps)
    val_answers = found["val"].kept
    return RunData(sampler, list(val_answers), Counter(map(str.strip, val_answers.values())), total_steps, bad_rows)


def _too_few(split: str, n: int, needed: int, result: FilterResult, bad_file: str, max_prompt_length: int) -> str:
    why = [f"{len(result.bad)} are bad (see {bad_file})"] if result.bad else []
    if result.too_long:
        tokens = sorted(result.too_long.values())
        why.append(
            f"{len(tokens)} have prompts of {tokens[0]} to {tokens[-1]} tokens, above "
            f"data.max_prompt_length={max_prompt_length}: raise that, and runner.seq_length"
        )
    short = f"data.rollout_batch_size={needed} needs more" if split == "train" else "nothing could be validated"
    lower = "; or lower data.rollout_batch_size" if split == "train" and result.kept else ""
    return (
        f"data.{split}_data_paths: of {n} rows {len(result.kept)} can be used; {short}. "
        f"{'; '.join(why) or 'There are no more'}{lower}"
    )
