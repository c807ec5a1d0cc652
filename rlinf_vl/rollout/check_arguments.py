"""Reads what `check-env` and `check-reward` get on the command line: keywords and rows of data."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import yaml

from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.sources import open_source
from rlinf_vl.errors import ConfigError
from rlinf_vl.types import Problem

#: Keys of `data` that define how a row is read.
FORM_KEYS = {key.name for key in fields(RowFormat)}


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
    try:
        columns = open_source(path, "train").rows.column_names
        row_format = RowFormat(**form)
        if row_format.for_columns(columns).format == "rlinf":
            # Unlike a run, a check reads rows without images.
            form.setdefault(
                "image_keys", [name for name in row_format.image_keys if name in columns]
            )
        dataset = ProblemDataset([path], "train", RowFormat(**form))
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from error
    return [dataset[row] for row in range(min(limit, len(dataset)))]
