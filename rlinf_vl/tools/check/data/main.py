"""The verb `check-data`: inspect every row, print the figures, and write them as JSON and as a page
with pictures."""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlinf_vl.config import Config, load_config
from rlinf_vl.config.toys import model_folder
from rlinf_vl.data.dataset import open_datasets
from rlinf_vl.data.sources import FILE_FORMATS, HUB_PREFIX
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.tools.check.data.look import inspect_rows
from rlinf_vl.tools.check.data.page import write_page
from rlinf_vl.tools.check.data.summary import Split, render, summarize
from rlinf_vl.tools.check.inputs import DATA_RULES

#: The config by which data is read where none is named, and overrides of its keys that have no
#: meaning then.
_DEFAULT_CONFIG = "toy-grpo-cpu"
_DEFAULT_OVERRIDES = ("data.val_data_paths=[]", "data.rollout_batch_size=1")


def main(arguments: argparse.Namespace) -> int:
    """`rlinf-vl check-data CONFIG|DATA`: exit code 0 if training would take the data, 1
    if it would not."""
    start_s = time.monotonic()
    config, counts_tokens = _config(arguments)
    try:
        datasets = open_datasets(config.data, ENVIRONMENTS)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    rows = {split: len(dataset) for split, dataset in datasets.items()}
    if "val" in rows and config.data.val_samples >= 0:
        rows["val"] = min(rows["val"], config.data.val_samples)
    model = config.rollout.model.model_path if counts_tokens else None
    path = None if model is None else model_folder(model)
    # CPUs of this process: a scheduler may have restricted it to some of the machine's
    workers = arguments.workers or len(os.sched_getaffinity(0))
    with _progress(sum(rows.values())) as progress:
        inspected = inspect_rows(config, path, rows, workers, progress)
    paths = {"train": config.data.train_data_paths, "val": config.data.val_data_paths}
    splits = []
    for name, dataset in datasets.items():
        row_ids = [dataset.row_id(i) for i in range(rows[name])]
        result, facts = inspected[name]
        splits.append(Split(name, paths[name], row_ids, result, facts))
    figures = summarize(splits, config, model, time.monotonic() - start_s)
    folder = run_folder(config).parent / "check-data"
    page = arguments.output or page_of(folder, config.runner.experiment_name, figures)
    page.parent.mkdir(parents=True, exist_ok=True)
    with write_aside(page.with_suffix(".json"), durable=False) as aside:
        # ids and answers may have lone surrogates, which UTF-8 refuses
        aside.write_text(
            json.dumps(figures, ensure_ascii=False, indent=1), encoding="utf-8", errors="replace"
        )
    write_page(page, splits, datasets, figures)
    print(
        f"{render(figures)}\n"
        "\n"
        f"{page} has pictures, {page.with_suffix('.json').name} beside it every row"
    )
    return 1 if figures["refused"] else 0


def page_of(folder: Path, name: str, figures: Mapping[str, Any]) -> Path:
    """Return the page of a data set: the one of its last check, or one that no other data set has."""
    checked_paths = {split: facts["paths"] for split, facts in figures["splits"].items()}
    for number in itertools.count(1):
        page = folder / (f"{name}.html" if number == 1 else f"{name}-{number}.html")
        try:
            written_splits = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))[
                "splits"
            ]
        except (OSError, ValueError, KeyError):
            return page
        if {split: facts.get("paths") for split, facts in written_splits.items()} == checked_paths:
            return page
    raise AssertionError("numbers don't end")


def _config(arguments: argparse.Namespace) -> tuple[Config, bool]:
    """Return the named config, or one for the named data, and whether tokens are counted by its
    model."""
    name, overrides = arguments.config, arguments.overrides
    is_data = (
        name.startswith(HUB_PREFIX) or Path(name).is_dir() or Path(name).suffix in FILE_FORMATS
    )
    if not is_data:
        return load_config(name, overrides, DATA_RULES), True
    has_model = any(text.startswith("rollout.model.model_path=") for text in overrides)
    of_data = [f'data.train_data_paths=["{name}"]', f'runner.experiment_name="{Path(name).stem}"']
    # the user's own overrides come last, so they win
    all_overrides = [*of_data, *_DEFAULT_OVERRIDES, *overrides]
    return load_config(_DEFAULT_CONFIG, all_overrides, DATA_RULES), has_model


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a bar on the terminal by a number of rows."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total, console)
        return
    with Progress(
        TextColumn("checking rows"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)


def _lines(total: int, console: Console) -> Callable[[int], None]:
    """Return a function that counts finished rows and prints a line for each further tenth of them."""
    done = 0
    console.print(f"checking {total} rows", highlight=False)

    def advance(rows: int) -> None:
        nonlocal done
        tenths = done * 10 // total
        done += rows
        if done * 10 // total > tenths and done < total:
            console.print(f"checking rows: {done} of {total}", highlight=False)

    return advance
