"""Reads what `check-env` and `check-reward` get on the command line: keywords and rows of data."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import yaml

from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.sources import open_source
from rlinf_vl.data.unusable import RowError
from rlinf_vl.errors import ConfigError
from rlinf_vl.types import Problem

#: Keys of `data` that define how a row is read.
FORM_KEYS = {key.name for key in fields(RowFormat)}
#: Values up to which a column may divide the rows into kinds, as a task's name or a level does.
MAX_COLUMN_VALUES = 16


def parsed_overrides(
    overrides: Sequence[str], meaning: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse arguments `key=value`.

    Args:
        meaning: says in an error what a key is.

    Returns:
        (keywords, the keys of `data.*` without "data.").

    Raises:
        ConfigError: an argument has another form.
    """
    kwargs: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        try:
            parsed_value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{text!r}: its value is not YAML: {error}") from error
        if not equals:
            raise ConfigError(f"{text!r}: write key=value, {meaning}")
        if name.startswith("data."):
            form[name.removeprefix("data.")] = parsed_value
        else:
            kwargs[name] = parsed_value
    return kwargs, form


def problems_of(path: str, form: dict[str, Any], limit: int) -> list[Problem]:
    """Return the first `limit` rows of a data set."""
    dataset = dataset_of(path, form)
    return [dataset[row] for row in range(min(limit, len(dataset)))]


def dataset_of(path: str, form: dict[str, Any]) -> ProblemDataset:
    """Return the rows of a data set.

    Raises:
        ConfigError: it can't be opened, or lacks a column.
    """
    try:
        columns = open_source(path, "train").rows.column_names
        row_format = RowFormat(**form)
        if row_format.for_columns(columns).format == "rlinf":
            # Unlike a run, a check reads rows without images.
            form.setdefault(
                "image_keys", [name for name in row_format.image_keys if name in columns]
            )
        return ProblemDataset([path], "train", RowFormat(**form))
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from error


def spread_problems(dataset: ProblemDataset, limit: int) -> list[Problem]:
    """Return up to `limit` usable rows, spread over the file and over its columns' values.

    Half of them at most are rows of values that the other rows lack; a run leaves bad rows out, too.

    Raises:
        RowError: none of the rows is usable.
    """
    rows: list[int] = []
    for values in dataset.small_columns(MAX_COLUMN_VALUES):
        present_values = set(values[rows].tolist())
        for value, row in zip(*np.unique(values, return_index=True), strict=True):
            if value not in present_values and len(rows) < limit // 2:
                rows.append(int(row))
                present_values.add(value)
    free_rows = np.setdiff1d(np.arange(len(dataset)), rows)
    n_spaced = min(limit - len(rows), len(free_rows))
    rows += [int(free_rows[n * len(free_rows) // n_spaced]) for n in range(n_spaced)]
    problems, errors = [], []
    for row in sorted(rows):
        try:
            problems.append(dataset[row])
        except RowError as error:
            errors.append(error)
    if errors and not problems:
        raise errors[0]
    return problems
