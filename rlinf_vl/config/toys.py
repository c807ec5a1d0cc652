"""The embedded tasks: a name stands for a data set in `data.train_data_paths`, for a checkpoint in `rollout.model.model_path`.

Both are made on first use by the room `rlinf_vl.toy`. What is said here is known without importing it.
"""

from typing import NamedTuple


class ToyEntry(NamedTuple):
    """One embedded task."""

    source: str  # module:name of the `rlinf_vl.toy.task.Toy` that makes the data and the demonstrations
    columns: tuple[str, ...]  # of its data
    rows: dict[str, int]  # by split, "train" and "val"
    model_type: str = "qwen3_vl"  # of its checkpoint


_QUESTIONS = (("id", "problem", "images", "answer"), {"train": 5840, "val": 152})
TOYS = {
    "toy": ToyEntry("rlinf_vl.toy.drawings:TOY", *_QUESTIONS),
    "toy-maze": ToyEntry("rlinf_vl.toy.maze:TOY", ("id", "problem", "maze", "answer"), {"train": 4096, "val": 192}),
    "toy-tool": ToyEntry("rlinf_vl.toy.rectangle_tool:TOY", *_QUESTIONS),
    # the data of `toy`, and models of other families
    "toy-qwen3_5": ToyEntry("rlinf_vl.toy.drawings:QWEN3_5", *_QUESTIONS, "qwen3_5"),
    "toy-qwen3_vl_moe": ToyEntry("rlinf_vl.toy.drawings:MOE", *_QUESTIONS, "qwen3_vl_moe"),
}
