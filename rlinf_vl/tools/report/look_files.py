"""The file of what recorded answers owe to their images: `look/step_N.parquet`, a row a trajectory.

`rlinf_vl.tools.report.look` writes it, and the report reads it beside `trajectories/step_N.parquet`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlinf_vl.runtime.files import write_aside

#: Columns with a number per token, as in a trajectory's `response_ids`; NaN where not sampled.
WITH_IMAGES, WITH_BLANKS = "logprob with images", "logprob with blank images"
#: The columns that name a trajectory within its step.
KEY = ("split", "group_id", "sample")
SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("group_id", pa.string()),
        ("sample", pa.int32()),
        (WITH_IMAGES, pa.list_(pa.float32())),
        (WITH_BLANKS, pa.list_(pa.float32())),
        # JSON: [{"image": its number in the trajectory's images, "values": [[…], …] nats by rows and
        # columns of patches, "forwards": cells that were hidden}, …]
        ("heat_maps", pa.string()),
        ("weights_step", pa.int32()),  # of the checkpoint that scored
    ]
)


def look_file(run: Path, step: int) -> Path:
    """Return the path of a step's file, which may not exist."""
    return run / "look" / f"step_{step}.parquet"


def write_look(run: Path, step: int, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a step's file, and return its path."""
    file = look_file(run, step)
    file.parent.mkdir(exist_ok=True)
    with write_aside(file, durable=False) as aside:
        pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), aside, compression="zstd")
    return file
