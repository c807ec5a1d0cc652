"""What makes an embedded task: its rows, and the demonstrations that its checkpoint is warm-started on."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.cache import build_once, cache_root, source_version
from rlinf_vl.types import Message

Split = Literal["train", "val"]
#: Seed of the checkpoint that the examples start from: an ordinary one among those tried, not the best.
DEFAULT_SEED = 1


@dataclass(frozen=True, slots=True)
class Toy:
    """One embedded task, and the model for it; `rlinf_vl.config.toys` says where.

    Attributes:
        sources: files that decide on data and demonstrations: another text of one, and both are made anew.
        make_rows: the rows of a split, with the columns of `TOYS`; deterministic.
        demonstrate: one conversation to imitate, from a random stream: user and assistant messages in turn, pictures as
            {"type": "image", "image": uint8 [H, W, 3]}, sides multiples of 16. Loss is on the assistant's.
        words: pieces of text that are one token each, beside `rlinf_vl.toy.files.WORDS`.
        steps, batch_size: of the warm start, in conversations.
        summary: what the task is and what is planted in it, in plain words; shown wherever its learning curve is.
        model_type: the family of the checkpoint.
    """

    name: str
    sources: tuple[str, ...]
    make_rows: Callable[[Split], list[dict[str, Any]]]
    demonstrate: Callable[[np.random.Generator], list[Message]]
    words: tuple[str, ...]
    steps: int
    batch_size: int
    summary: Callable[[], str]
    model_type: str = "qwen3_vl"


def toy_of(name: str) -> Toy:
    """The embedded task of a name in `TOYS`."""
    module, _, attribute = TOYS[name].source.partition(":")
    return getattr(importlib.import_module(module), attribute)


def toy_dataset_path(split: Split, toy: str = "toy", *, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Path of the parquet file of "train" or "val", made on first use under `cache_root(cache_dir)`."""
    if split not in ("train", "val"):
        raise ValueError(f"split: {split!r} is neither 'train' nor 'val'")
    task = toy_of(toy)

    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        text, images = pa.string(), pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        schema = pa.schema({column: images if column == "images" else text for column in TOYS[toy].columns})
        pq.write_table(pa.Table.from_pylist(task.make_rows(split), schema=schema), path)

    version = source_version(*task.sources, __file__)
    return build_once(cache_root(cache_dir) / f"{task.name}-{version}" / f"{split}.parquet", write)
