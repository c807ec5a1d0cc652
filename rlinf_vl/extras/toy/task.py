"""Embedded tasks: their rows, and demonstrations for the warm start of their checkpoints."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlinf_vl.config.parts import named
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.cache import build_once, cache_root, source_version
from rlinf_vl.types import Message

Split = Literal["train", "val"]
#: Seed of the checkpoint from which the examples start: an average one of several, not the best.
DEFAULT_SEED = 1


@dataclass(frozen=True, slots=True)
class Toy:
    """One embedded task and its model; `rlinf_vl.config.toys` lists all tasks.

    Attributes:
        sources: files that determine data and demonstrations; a change of one rebuilds both.
        make_rows: makes the rows of a split, with the columns of `TOYS`; deterministic.
        demonstrate: draws conversations to imitate from a random stream, which differ in their last
            message alone. User and assistant messages alternate; pictures are {"type": "image",
            "image": uint8 [H, W, 3]} and videos {"type": "video", "video": uint8 [T, H, W, 3]},
            their sides multiples of 16. Only the assistant's messages carry loss.
        words: pieces of text that are one token each, besides `rlinf_vl.extras.toy.files.WORDS`.
        steps: optimizer steps of the warm start.
        batch_size: draws of `demonstrate` in a step of the warm start.
        summary: describes the task and its planted mistake, in plain words; shown with its learning
            curves.
        model_type: the family of the checkpoint.
        learning_rate: of the warm start.
        cooldown_steps: the last steps of the warm start, in which the rate falls to 0.
    """

    name: str
    sources: tuple[str, ...]
    make_rows: Callable[[Split], list[dict[str, Any]]]
    demonstrate: Callable[[np.random.Generator], list[list[Message]]]
    words: tuple[str, ...]
    steps: int
    batch_size: int
    summary: Callable[[], str]
    model_type: str = "qwen3_vl"
    learning_rate: float = 2e-3
    cooldown_steps: int = 80


def is_held_out(layout: str) -> bool:
    """Return whether a layout belongs to the validation split: a hash of its text holds out one in
    eight."""
    return hashlib.sha256(layout.encode()).digest()[0] % 8 == 0


def toy_of(name: str) -> Toy:
    """Return the embedded task of a name in `TOYS`."""
    return named(TOYS[name].source)


def toy_dataset_path(
    split: Split, toy: str = "toy", *, cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Return the path of the parquet file of a split, which is made on first use.

    It lies under `cache_root(cache_dir)`.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split: {split!r} is neither 'train' nor 'val'")
    task = toy_of(toy)

    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        files = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        types = dict.fromkeys(TOYS[toy].columns, pa.string()) | {
            column: files for column in ("images", "videos") if column in TOYS[toy].columns
        }
        schema = pa.schema(types)
        pq.write_table(pa.Table.from_pylist(task.make_rows(split), schema=schema), path)

    version = source_version(*task.sources, __file__)
    return build_once(cache_root(cache_dir) / f"{task.name}-{version}" / f"{split}.parquet", write)
