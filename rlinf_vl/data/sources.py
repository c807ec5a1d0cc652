"""Where rows come from: files, dataset folders, hub names and the embedded toy task, each as memory-mapped rows.

Rows are read in Arrow's own form, so that `datasets` never decodes an image: cells hold what was stored.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from rlinf_vl.data.peek import FILE_FORMATS, peek

log = logging.getLogger(__name__)

HUB_PREFIX = "hf://"
_VAL_SPLITS = ("validation", "val", "valid", "dev", "test", "train")


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one entry of data.train_data_paths.

    `name` is that entry as errors show it, `stem` the beginning of its rows' ids; `root` is the folder that image paths
    in rows are relative to (None for the hub).
    """

    name: str
    stem: str
    rows: datasets.Dataset
    root: Path | None

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int, columns: Sequence[str]) -> dict[str, Any]:
        """The wanted columns of row i as Python values: bytes, strings, numbers, lists and dicts."""
        table: Any = self.rows.with_format("arrow", columns=list(columns))[i]
        features = self.rows.features
        return {name: _python(features[name], value) for name, value in table.to_pylist()[0].items()}

    def ids(self) -> list[str]:
        """One unique id per row: `<stem>:<value of column id>`, or the row's number where there is no such column."""
        numbers = [f"{self.stem}:{i}" for i in range(len(self))]
        if "id" not in self.rows.column_names:
            return numbers
        feature = self.rows.features["id"]
        values = self.rows.with_format("arrow", columns=["id"])[:]["id"].to_pylist()
        values = [_python(feature, value) for value in values]
        if not all(isinstance(value, (str, int)) for value in values) or len(set(map(str, values))) < len(values):
            log.warning("%s: column 'id' has missing or repeated values; rows are named by number", self.name)
            return numbers
        return [f"{self.stem}:{value}" for value in values]


def open_source(name: str, split: str) -> Source:
    """Open one entry of data.train_data_paths or data.val_data_paths.

    Args:
        name: a parquet, json or jsonl file; a folder of them, or one that `save_to_disk` wrote; `hf://owner/name[:split]`
            (split train unless named); or `toy`.
        split: "train" or "val": which part of the toy task or of a folder with several parts.

    Raises:
        ValueError: nothing of that kind is there, or it can't be read.
    """
    datasets.disable_progress_bars()
    if name == "toy":
        from rlinf_vl.toy.drawings import toy_dataset_path

        path = Path(toy_dataset_path("train" if split == "train" else "val"))
        return Source(name, "toy", _load(name, path, split), path if path.is_dir() else path.parent)
    if name.startswith(HUB_PREFIX):
        repository, _, hub_split = name.removeprefix(HUB_PREFIX).partition(":")
        try:
            rows = datasets.load_dataset(repository, split=hub_split or "train")
        except Exception as e:  # the hub's client raises its own, the network's and the builders' errors
            raise ValueError(f"{name}: can't be loaded from the hub: {type(e).__name__}: {e}") from e
        return Source(name, repository, rows, None)
    path = Path(name).expanduser()
    if not path.exists():
        raise ValueError(f"{name}: no such file or folder (hub datasets are named {HUB_PREFIX}owner/name[:split])")
    return Source(name, path.stem, _load(name, path, split), path if path.is_dir() else path.parent)


def _load(name: str, path: Path, split: str) -> datasets.Dataset:
    try:
        peek(path)
    except ValueError as e:
        raise ValueError(f"{name} {e}") from e
    try:
        if path.is_file():
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=[str(path)], split="train")
        saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as e:  # builders raise Arrow's, pandas' and their own errors, few of which name a row
        try:
            peek(path, scanned=2**32)
        except ValueError as known:
            raise ValueError(f"{name} {known}") from e
        raise ValueError(f"{name}: can't be read: {type(e).__name__}: {e}") from e
    return _choose_split(name, loaded, split)


def _choose_split(name: str, loaded: datasets.Dataset | datasets.DatasetDict, split: str) -> datasets.Dataset:
    """A folder's rows: its only part, else the one named for training or validation."""
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    for part in ("train",) if split == "train" else _VAL_SPLITS:
        if part in loaded:
            return loaded[part]
    raise ValueError(
        f"{name}: none of its parts {', '.join(map(str, loaded))} is for {split}; name one of its files instead"
    )


def _python(feature: Any, value: Any) -> Any:
    """Undo the JSON encoding that `datasets` gives to columns of mixed types, and the widening of short floats by Arrow;
    leave everything else as stored."""
    if value is None:
        return None
    if isinstance(feature, datasets.Json):
        return json.loads(value)
    if isinstance(feature, datasets.Value) and feature.dtype in ("float16", "float32"):
        return np.dtype(feature.dtype).type(value)
    if isinstance(feature, dict):
        return {key: _python(feature[key], item) for key, item in value.items()}
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return [_python(feature.feature, item) for item in value]
    return value
