"""Where a step's samples go, with their images: TensorBoard, wandb and trackio, from a process that isn't the scalars'.

Models write the texts, so nothing in them is markup: TensorBoard gets them as code blocks, tables get them made inert.
"""

import io
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from rlinf_vl.observe.tracker import WANDB_ID, check_backends, import_backend, open_wandb

logger = logging.getLogger(__name__)

#: Shown of a step and split, spread over its rows.
MAX_SAMPLES = 16
#: Characters shown of a text.
MAX_TEXT = 4000
#: Of a sample, so many images are shown, side by side, and none with a longer side, in pixels.
MAX_IMAGES, MAX_SIDE = 4, 384

TEXTS = ("prompt", "response", "answer", "error")
FACTS = ("problem_id", "reward", "advantage", "correct", "finish_reason")


@dataclass(frozen=True)
class Sample:
    """A row as it is shown: what it has of `FACTS` and `TEXTS`, texts printable and short; its images as one."""

    values: Mapping[str, str | float | bool | None]
    picture: Image.Image | None


class SampleTracker(Protocol):
    """Takes the samples of a step and split; of one step and split at most once, unless the run went back."""

    def log(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        """Show these."""
        ...

    def close(self) -> None:
        """Write out what is held; nothing is logged after it."""
        ...


class TensorBoardSamples:
    """Texts and images in `folder`, which must not be the scalars': TensorBoard reads only the newest file of a folder. Where a
    run goes back to a step, what was written from there on is hidden."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._writer, self._step = folder, None, 0

    def log(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        # TensorBoard's own writer, whose generated modules have no types: torch's would import torch, which nothing here needs
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None or step < self._step:
            self.close()
            self._writer = EventFileWriter(str(self._folder))
            self._writer.add_event(Event(wall_time=time.time(), step=step, file_version="brain.Event:2"))
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=restart))
        self._step = step
        is_text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        values = []
        for i, sample in enumerate(samples):
            known = {name: value for name, value in sample.values.items() if value is not None}
            facts = " · ".join(f"{name}: {known[name]}" for name in FACTS if name in known)
            parts = {"facts": facts} | {name: str(known[name]) for name in TEXTS if name in known}
            text = "\n\n".join(f"**{name}**\n\n{code_block(part)}" for name, part in parts.items())
            tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
            values.append(Summary.Value(tag=f"{split}/{i}/text_summary", metadata=is_text, tensor=tensor))
            if sample.picture is not None:
                png = io.BytesIO()
                sample.picture.save(png, "PNG")
                width, height = sample.picture.size
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png.getvalue())
                values.append(Summary.Value(tag=f"{split}/{i}", image=image))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class TableSamples:
    """A table a step and split, of wandb or trackio, which name things alike."""

    def __init__(self, backend: Any, run: Any, log: Callable[[dict[str, Any], int], None]) -> None:
        self._backend, self._run, self._log = backend, run, log

    def log(self, step: int, split: str, samples: Sequence[Sample]) -> None:
        rows = [[s.picture and self._backend.Image(s.picture), *map(inert, s.values.values())] for s in samples]
        table = self._backend.Table(columns=["images", *FACTS, *TEXTS], data=rows)
        self._log({f"samples/{split}": table}, step)

    def close(self) -> None:
        self._run.finish()


def _join_wandb(run_dir: Path, project_name: str, experiment_name: str) -> TableSamples:
    """Into the run that the scalars' process has begun; FileNotFoundError if it hasn't."""
    run = open_wandb(
        run_dir,
        project_name=project_name,
        experiment_name=experiment_name,
        run_id=(run_dir / WANDB_ID).read_text().strip(),
        primary=False,
    )
    return TableSamples(import_backend("wandb"), run, lambda values, step: run.log(values | {"step": step}))


def _join_trackio(project_name: str, experiment_name: str) -> TableSamples:
    """Into the newest run of this name."""
    trackio = import_backend("trackio")
    run = trackio.init(
        project=project_name, name=experiment_name, resume="allow", auto_log_cpu=False, auto_log_gpu=False
    )
    return TableSamples(trackio, run, lambda values, step: run.log(values, step=step))


class SampleTrackers:
    """Several as one, each opened when there is something to log. One that fails warns once; training goes on."""

    def __init__(self, openers: Mapping[str, Callable[[], SampleTracker]]) -> None:
        self._openers = dict(openers)
        self._open: dict[str, SampleTracker] = {}
        self._warned: set[str] = set()

    def log(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show some of these rows, which have the keys split, prompt, response, answer, error, problem_id, reward, advantage,
        correct, finish_reason (text, numbers or None), and images: encoded bytes."""
        for split in dict.fromkeys(row["split"] for row in rows) if self._openers else ():
            of_split = [row for row in rows if row["split"] == split]
            samples = [_sample(row) for row in of_split[:: -(-len(of_split) // MAX_SAMPLES)]]
            for name in list(self._openers):
                self._call(name, "log", step, split, samples)

    def close(self) -> None:
        for name in self._open:
            self._call(name, "close")

    def _call(self, name: str, method: str, *args: Any) -> None:
        try:
            if name not in self._open:
                self._open[name] = self._openers[name]()
            getattr(self._open[name], method)(*args)
        except Exception as error:
            if name not in self._open:
                del self._openers[name]
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("samples to %s failed (%r); training goes on", name, error)


def make_sample_trackers(
    run_dir: str | Path, backends: Sequence[str], *, project_name: str, experiment_name: str
) -> SampleTrackers:
    """Samples to what `backends` names, out of `TRACKER_BACKENDS`; each joins what the scalars' tracker began there.

    Raises:
        ValueError: an unknown backend.
    """
    check_backends(backends)
    run_dir = Path(run_dir)
    names = {"project_name": project_name, "experiment_name": experiment_name}
    openers: dict[str, Callable[[], SampleTracker]] = {
        "tensorboard": partial(TensorBoardSamples, run_dir / "tensorboard" / "samples"),
        "wandb": partial(_join_wandb, run_dir, **names),
        "trackio": partial(_join_trackio, **names),
    }
    return SampleTrackers({name: openers[name] for name in openers if name in backends})


def inert(value: Any) -> Any:
    """Text that is no HTML or Markdown either: an invisible space is behind each character that a tag, a link or an image
    needs. Other values as they are."""
    return value.replace("<", "<\u200b").replace("]", "]\u200b") if isinstance(value, str) else value


def code_block(text: str) -> str:
    """Markdown that shows just this text: within an indented block nothing has a meaning."""
    return "\n".join("    " + line for line in text.splitlines())


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample({name: _short(row[name]) for name in (*FACTS, *TEXTS)}, _picture(row["images"]))


def _short(value: Any) -> str | float | bool | None:
    if not isinstance(value, str):
        return value if value is None or isinstance(value, bool) else round(float(value), 4)
    rest = f"… ({len(value) - MAX_TEXT} characters more)" if len(value) > MAX_TEXT else ""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in value[:MAX_TEXT]) + rest


def _picture(images: Sequence[bytes]) -> Image.Image | None:
    """The first images side by side, made small; None where there is none. One that can't be decoded is left out."""
    tiles = []
    for data in images[:MAX_IMAGES]:
        with suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            tile = Image.open(io.BytesIO(data))
            tile.thumbnail((MAX_SIDE, MAX_SIDE))
            tiles.append(tile.convert("RGB"))
    if not tiles:
        return None
    edges = [0, *accumulate(tile.width + 4 for tile in tiles)]
    picture = Image.new("RGB", (edges[-1] - 4, max(tile.height for tile in tiles)), "gray")
    for tile, x in zip(tiles, edges, strict=False):
        picture.paste(tile, (x, 0))
    return picture
