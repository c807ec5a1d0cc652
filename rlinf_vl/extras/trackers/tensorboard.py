"""TensorBoard: event files of scalars and samples."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.observe.samples import FACTS, TEXTS, Sample, code_block
from rlinf_vl.observe.tracker import TrackedRun, Tracker


class TensorBoardTracker:
    """Event files in `folder`.

    TensorBoard reads only the newest file of a folder, so scalars and samples need one each. Where
    a run goes back to a step, its later records are hidden.

    Args:
        first_step: hide the records of an earlier process from this step on; None: from the first
            step that is logged.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        self._folder = folder
        self._first_step = first_step
        self._step = 0
        self._writer: Any = None

    def _writer_at(self, step: int) -> Any:
        """Return the writer for records of this step."""
        # Steps only grow within a file; TensorBoard hides later steps only at the start of a new
        # one.
        if self._writer is None or step < self._step:
            from torch.utils.tensorboard import SummaryWriter  # a second of imports

            purge_step = step if self._writer or self._first_step is None else self._first_step
            self.close()
            self._wait_for_later_name()
            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
        self._step = step
        return self._writer

    def _wait_for_later_name(self) -> None:
        """Wait until the second in which the newest file was begun is over.

        TensorBoard reads a folder's files by name. Files of one second differ by a number that it
        sorts as text (10 before 9), so the file that hides later steps could be read first.
        """
        seconds = (path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*"))
        newest = max((int(second) for second in seconds if second.isdigit()), default=0)
        time_s = time.time()
        if newest <= time_s < newest + 1:
            time.sleep(newest + 1 - time_s)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                self._writer_at(step).add_scalar(name, float(value), step)
            self._writer_at(step).flush()
        except OSError:  # the disk was full: this writer writes no more
            self._writer, self._first_step = None, None
            raise

    def log_samples(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        for i, sample in enumerate(samples):
            values = {name: value for name, value in sample.values.items() if value is not None}
            facts = " · ".join(f"{name}: {values[name]}" for name in FACTS if name in values)
            parts = {"facts": facts} | {name: str(values[name]) for name in TEXTS if name in values}
            text = "\n\n".join(f"**{name}**\n\n{code_block(part)}" for name, part in parts.items())
            self._writer_at(step).add_text(f"{split}/{i}", text, step)
            if sample.picture is not None:
                self._writer_at(step).add_image(
                    f"{split}/{i}", np.asarray(sample.picture), step, dataformats="HWC"
                )
        self._writer_at(step).flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def open_tensorboard(run: TrackedRun) -> Tracker:
    if run.config is None:
        return TensorBoardTracker(run.folder / "tensorboard" / "samples")
    return TensorBoardTracker(run.folder / "tensorboard", run.resume_step + 1)
