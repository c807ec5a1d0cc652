"""A weight-sync strategy in one file: weights are files in a folder that ranks and workers share."""

import os
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from rlinf_vl.weights.buckets import Label, flatten
from rlinf_vl.weights.sender import Sender
from rlinf_vl.weights.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLabel(Label):
    """The label of a bucket that will be in a file."""

    path: Path


@dataclass
class FileSender(Sender):
    """Rank 0 writes a file for each bucket; other ranks only take part in the gathering."""

    def make_labels(self, check: bool) -> Sequence[FileLabel]:
        labels = Sender.make_labels(self, check)
        if self.rank:
            return []
        self._folder = Path(tempfile.mkdtemp())
        return [
            FileLabel(entries=label.entries, fingerprint=label.fingerprint, path=self._folder / str(i))
            for i, label in enumerate(labels)
        ]  # fmt: skip

    def deliver(self, readers: Sequence[ray.ObjectRef] = ()) -> None:
        for i, _, bucket in self.buckets():
            if self.rank == 0:
                unfinished = self._folder / f"{i}.part"
                flatten(bucket).numpy().tofile(unfinished)
                os.replace(unfinished, self._folder / str(i))
        self.keep_sent()

    def release(self) -> None:
        if self.rank == 0:
            shutil.rmtree(self._folder)


class FileStrategy(Strategy):
    name = "files"
    sender = FileSender

    def received(
        self, labels: Sequence[FileLabel], device: str
    ) -> Generator[dict[str, torch.Tensor]]:
        for label in labels:
            while not label.path.exists():
                time.sleep(1e-3)
            weights = label.views(
                torch.from_file(str(label.path), size=label.nbytes, dtype=torch.uint8)
            )
            label.verify(weights, "as received")
            yield weights
