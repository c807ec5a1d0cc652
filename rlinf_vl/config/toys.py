"""The embedded tasks: names of data sets in `data.train_data_paths`, of checkpoints in
`rollout.model.model_path`.

The package `rlinf_vl.extras.toy` makes both on first use. This table is read without importing it.
"""

from typing import NamedTuple

from rlinf_vl.config.parts import load_part


class ToyEntry(NamedTuple):
    """An embedded task."""

    # module:name of the `rlinf_vl.extras.toy.task.Toy` that makes the data and the demonstrations
    source: str
    columns: tuple[str, ...]  # of its data
    rows: dict[str, int]  # by split, "train" and "val"
    model_type: str = "qwen3_vl"  # of its checkpoint


#: The side in pixels of an image token of their checkpoints.
TOKEN_SIDE = 16
_QUESTION_COLUMNS = ("id", "problem", "images", "answer")
_VIDEO_COLUMNS = ("id", "problem", "videos", "answer")
_VIDEO_ROWS = {"train": 2976, "val": 120}
_QUESTION_ROWS = {"train": 5440, "val": 152}
TOYS = {
    "toy": ToyEntry("rlinf_vl.extras.toy.drawings:TOY", _QUESTION_COLUMNS, _QUESTION_ROWS),
    "toy-maze": ToyEntry(
        "rlinf_vl.extras.toy.maze:TOY",
        ("id", "problem", "maze", "answer"),
        {"train": 4096, "val": 192},
    ),
    "toy-tool": ToyEntry(
        "rlinf_vl.extras.toy.rectangle_tool:TOY", _QUESTION_COLUMNS, _QUESTION_ROWS
    ),
    "toy-browser": ToyEntry(
        "rlinf_vl.extras.toy.buttons:TOY",
        ("id", "problem", "pages", "answer"),
        {"train": 4096, "val": 192},
    ),
    # What the warm start of `toy` imitates, and its model before that.
    "toy-sft": ToyEntry(
        "rlinf_vl.extras.toy.demonstrations:TOY",
        ("id", "messages", "problem", "images", "answer"),
        {"train": 8960, "val": 152},
    ),
    "toy-video": ToyEntry("rlinf_vl.extras.toy.motion:TOY", _VIDEO_COLUMNS, _VIDEO_ROWS),
    # Controls, of which nothing can be learned: frames in random order, the first frame alone.
    "toy-video-shuffled": ToyEntry(
        "rlinf_vl.extras.toy.motion:SHUFFLED", _VIDEO_COLUMNS, _VIDEO_ROWS
    ),
    "toy-video-first": ToyEntry("rlinf_vl.extras.toy.motion:FIRST", _VIDEO_COLUMNS, _VIDEO_ROWS),
    # The data of `toy` with models of other families.
    "toy-qwen3_5": ToyEntry(
        "rlinf_vl.extras.toy.drawings:QWEN3_5", _QUESTION_COLUMNS, _QUESTION_ROWS, "qwen3_5"
    ),
    "toy-internvl": ToyEntry(
        "rlinf_vl.extras.toy.drawings:INTERNVL", _QUESTION_COLUMNS, _QUESTION_ROWS, "internvl"
    ),
    "toy-gemma3": ToyEntry(
        "rlinf_vl.extras.toy.drawings:GEMMA3", _QUESTION_COLUMNS, _QUESTION_ROWS, "gemma3"
    ),
    "toy-qwen3_vl_moe": ToyEntry(
        "rlinf_vl.extras.toy.drawings:MOE", _QUESTION_COLUMNS, _QUESTION_ROWS, "qwen3_vl_moe"
    ),
}


def model_folder(path: str) -> str:
    """Return the folder of an embedded task's checkpoint, which is made on first use; any other
    path as it is."""
    return str(load_part("toy-checkpoint")(path)) if path in TOYS else path
