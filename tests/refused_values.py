"""What expressions of tests/golden/refusals.txt name. They are evaluated in a folder of the files of tests/refusals.py."""

import io
import runpy
import sys
import types
import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vl.config import load
from rlinf_vl.config.placement import Placement, check_placement, placement_of
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data import bad_rows, images
from rlinf_vl.data.clips import MAGIC, clip_ref
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.images import decode, to_image_ref
from rlinf_vl.data.rows import row_to_problem
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.data.sources import open_source, peek
from rlinf_vl.data.unusable import BadRow
from rlinf_vl.extras.verifiers import rows as verifiers_rows
from rlinf_vl.extras.video import decoding as video_decoding
from rlinf_vl.extras.video import rows as videos
from rlinf_vl.extras.video.rows import to_clip_ref
from rlinf_vl.types import GroupSummary, ImageRef, Problem, TrajectorySummary

__all__ = [
    "MAGIC", "EpochSampler", "Fraction", "Image", "bad_rows", "clip_ref", "images", "np", "open_source", "peek", "verifiers_rows",
    "video_decoding", "videos",
]  # fmt: skip


ROOT = Path(__file__).resolve().parent.parent


def placed(
    placement: Any,
    *nodes: int,
    tp: int = 1,
    context: int = 1,
    experts: int = 1,
    backend: str = "sglang",
    elastic: bool = False,
) -> Placement:
    """Place actor and rollout on nodes of so many slots; by default on one node of four."""
    config = Config()
    config.cluster.component_placement = (
        {"actor,rollout": placement} if isinstance(placement, str) else placement
    )
    config.cluster.elastic_rollout = elastic
    config.rollout.rollout_backend, config.rollout.tensor_parallel_size = backend, tp
    config.actor.context_parallel_size = context
    config.actor.fsdp_config.expert_parallel_size = experts
    check_placement(config)
    return placement_of(config, nodes or (4,))


def row(problem: Any = "1 + 1?", answer: Any = "2", hub: bool = False, **cells: Any) -> Problem:
    """Read a row of these cells, or of `form` beside them, from a file or a data set of the hub."""
    form = {"image_keys": ["images"] if "images" in cells else []} | cells.pop("form", {})
    values = {"problem": problem, "answer": answer} | cells
    root = None if hub else Path.cwd()
    return row_to_problem(values, "rows:7", RowFormat(**form).for_columns(values), root)


def said(content: Any, role: str = "user", **keys: Any) -> dict[str, Any]:
    """Return a chat message."""
    return {"role": role, "content": content} | keys


def talk(*messages: Any, **columns: Any) -> Problem:
    """Read a row with a conversation to imitate: what a user says, what the assistant does, and so on."""
    roles = ("user", "assistant")
    chat = [
        said(text, roles[i % 2]) if isinstance(text, str) else text
        for i, text in enumerate(messages)
    ]
    values = {"messages": chat} | columns
    form = RowFormat(messages_key="messages").for_columns(values)
    return row_to_problem(values, "rows:7", form)


def image(value: Any, hosts: Sequence[str] = (), root: Path | None = Path(".")) -> ImageRef:
    """Read a value of a column of images."""
    return to_image_ref(value, root=root and Path.cwd() / root, hosts=hosts)


def decoded(value: Any) -> Image.Image:
    """Decode such a value."""
    return decode(image(value))


def clip(value: Any, root: Path | None = Path("."), **settings: Any) -> ImageRef:
    """Read a value of a column of videos."""
    root = root and Path.cwd() / root
    return to_clip_ref(value, root=root, settings=VideoConfig(**settings))


def png(width: int = 6, height: int = 4) -> bytes:
    """Return a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def noise() -> bytes:
    """Return a picture of which no part can be left out."""
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def tiff(values: np.ndarray) -> bytes:
    """Return a picture of these greys."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, "TIFF")
    return file.getvalue()


def video(count: int = 6, **settings: Any) -> bytes:
    """Return a file of so many frames."""
    import video_files

    return video_files.video(count, **settings)


def without_frames() -> bytes:
    """Return an mp4 file whose header has a video of 60 frames, and none of them."""
    data = bytearray(video(60))
    for box in (b"stsz", b"stts", b"ctts", b"stsc", b"stco", b"stss"):
        start = data.find(box)
        # The number of entries stands behind the version, and in stsz behind the common size.
        at = start + (12 if box == b"stsz" else 8)
        data[at : at + 4] = bytes(4)
    return bytes(data)


def sound() -> bytes:
    """Return a file of sound alone."""
    import video_files

    return video_files.sound()


def bounded(module: Any, name: str, bound: float, read: Callable[[], Any]) -> Any:
    """Read something while a module has another bound."""
    with unittest.mock.patch.object(module, name, bound):
        return read()


def dataset(*paths: str, split: str = "train", **form: Any) -> ProblemDataset:
    """Open a data set without images."""
    return ProblemDataset(paths, split, RowFormat(**{"image_keys": ()} | form))


def bad_reasons(*paths: str, **form: Any) -> list[str]:
    """Return why rows of such a data set can't be used, where a curriculum sorts by their answer."""
    rows = dataset(*paths, **form)
    filtered = rows.filter_by_length(range(len(rows)), lambda *_: 1, 9, level_key="level")
    return [f"{bad.kind}: {bad.id}: {bad.reason}" for bad in filtered.bad.values()]


def saved(**parts: Any) -> str:
    """Save a data set of several parts, and return its folder."""
    import datasets

    tables = {name: datasets.Dataset.from_dict(columns) for name, columns in parts.items()}
    datasets.DatasetDict(tables).save_to_disk("saved")
    return "saved"


def from_hub(name: str) -> None:
    """Open a data set of the hub, which can't be reached."""
    import datasets

    refused = unittest.mock.Mock(side_effect=ConnectionError("no route to it"))
    with unittest.mock.patch.object(datasets, "load_dataset", refused):
        open_source(name, "train")


def verifiers(
    path: str,
    installed: str = "0.3.1",
    raises: Exception | None = None,
    whole_groups: bool = False,
    read: Callable[[str], Any] = verifiers_rows.load_environment,
) -> Any:
    """Make an environment of the package `verifiers`, which has one of two rows under the name `words`."""
    words = unittest.mock.Mock(requires_group_rollouts=whole_groups)
    words.get_dataset.return_value = [{"prompt": "1?", "answer": "1"}] * 2
    package: Any = types.ModuleType("verifiers")
    package.load_environment = unittest.mock.Mock(return_value=words, side_effect=raises)
    verifiers_rows._load.cache_clear()
    with (
        unittest.mock.patch.dict(sys.modules, verifiers=package, words=types.ModuleType("words")),
        unittest.mock.patch.object(verifiers_rows, "version", lambda _: installed),
    ):
        return read(path)


def rollout(*errors: str, ungraded: bool = False) -> list[GroupSummary]:
    """Return the summary of a group whose trajectories have these errors; "" for none."""
    trajectories = []
    for error in errors:
        reason = {"ungraded": error} if ungraded else {"error": error or None}
        trajectories.append(TrajectorySummary(9, 4, 0.0, **reason))
    return [GroupSummary("0", "rows:7", 5, tuple(trajectories), 0, 0, 0, 0, {})]


def check_bad_rows(n: int, total: int, share: float) -> None:
    """Count bad rows as a run does."""
    record = bad_rows.BadRows(Path.cwd(), share, {"train": total})
    record.add("train", [BadRow("answer missing", f"rows:{i}", "column 'answer' is empty") for i in range(n)])  # fmt: skip
    record.check()


@cache
def _machine(gpus: int) -> Any:
    """Return the machine of docs/generate_memory_page.py with so many GPUs."""
    return runpy.run_path(str(ROOT / "docs/generate_memory_page.py"))["host"](gpus)


def doctor(*overrides: str, config: str = "qwen3-vl-2b-grpo-fsdp-geo3k", **facts: Any) -> list[str]:
    """Return what a check complains of on a machine of eight GPUs, of which these facts differ."""
    from rlinf_vl.tools.check import doctor

    if "packages" in facts:
        facts["packages"] = _machine(8).packages | facts["packages"]
    machine = replace(_machine(8), **facts)
    lines = doctor.check(machine, load.parse_config(config, overrides))
    return [f"{line.status} {line.subject}: {line.text}" for line in lines if line.status != "ok"]
