"""A training step as one file, for `rlinf-vl replay`: groups, images, plan, config and seeds.

The file is a zip archive of JSON, numpy arrays, encoded images, the small files of the model's
folder, and, where they fit, the weights before the step. Nothing in it is a pickle, so a file from
somebody else can be opened without running code.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.types import Group, ImageRef, Message, TokenSequence, Trajectory, Turn, TurnAdvantages

FORMAT = 1
SUFFIX = ".replay"
#: The folder of a run's replay files; as many, and as many bytes, as a run writes by itself.
FOLDER, MAX_FILES, MAX_BYTES = "replays", 8, 2**26
#: Bytes of a model's weights in float32 up to which a run puts them into a file by itself.
MAX_WEIGHT_BYTES = 2**24
#: Bytes of a model's files beside its weights up to which they are put into a file.
MAX_MODEL_FILE_BYTES = 4_000_000
#: (group, index of the trajectory in it).
TrajectoryNumber = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PlannedMiniBatch:
    """The trajectories of one optimizer step, in the micro-batches of all ranks, one after the
    other, and the denominator of its loss."""

    micro_batches: tuple[tuple[TrajectoryNumber, ...], ...]
    denominator: int

    @property
    def trajectories(self) -> list[TrajectoryNumber]:
        return [item for micro_batch in self.micro_batches for item in micro_batch]


@dataclass(frozen=True)
class RecordedStep:
    """A training step of a run.

    Attributes:
        step: number of the step; the weights before it have version `step` - 1.
        config: the run's config as YAML.
        groups: the groups that were trained on, or some of them.
        minibatches: the plan.
        advantages: of the run's plan, by group, trajectory and turn: a number, or those of the
            turn's sampled tokens, float32.
        train_logprobs: the run's logprobs of the sampled tokens under the weights before the step,
            float32, by trajectory; {} where they were not recorded.
        metrics: the run's metrics of the step; {} where they are not known, or if only some of its
            groups are here.
        messages: of the first prompt of each group, by group; {} where they are not known.
        engine_weights: by name, the fingerprint of a weight that the run's engine had.
        weights: the weights before the step by name, float32; {}: `model_path` has them.
        weights_source: where `weights` come from; not written.
        model_path: the folder or hub name of the run's model.
        model_files: files of the model's folder beside the weights, by name.
        total_steps: of the run, for its learning rate.
        random_weights: whether the weights are random ones of the model's shape.
        is_whole: whether all trajectories of the step are here; otherwise the counts that the loss
            is divided by, and the run's metrics, are of more than these.
        group_sizes: the number of trajectories of each group in the run.
        run: the run's folder.
        reason: why the file was written; "" if somebody asked for it.
    """

    step: int
    config: str
    groups: tuple[Group, ...]
    minibatches: tuple[PlannedMiniBatch, ...]
    advantages: tuple[tuple[tuple[float | np.ndarray, ...], ...], ...]
    train_logprobs: Mapping[TrajectoryNumber, np.ndarray] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Mapping[int, Sequence[Message]] = field(default_factory=dict)
    engine_weights: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights_source: str = "in the file"
    model_path: str = ""
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    total_steps: int = 1
    random_weights: bool = False
    is_whole: bool = True
    group_sizes: tuple[int, ...] = ()
    run: str = ""
    reason: str = ""

    @property
    def version(self) -> int:
        """The version of the weights before the step."""
        return self.step - 1

    def group_is_whole(self, g: int) -> bool:
        """Return whether all trajectories of a group are here, so that its advantages follow."""
        n = len(self.groups[g].trajectories)
        return n == (self.group_sizes[g] if self.group_sizes else n)

    def save(self, path: Path) -> None:
        """Write the file."""
        arrays: dict[str, np.ndarray] = {}
        images: dict[str, ImageRef] = {}
        groups = [_group_entry(n, group, arrays, images) for n, group in enumerate(self.groups)]
        for (g, i), logprobs in self.train_logprobs.items():
            arrays[f"train_logprobs/{g}/{i}"] = logprobs
        header = {
            "format": FORMAT,
            "step": self.step,
            "groups": groups,
            "minibatches": [asdict(mini) for mini in self.minibatches],
            "advantages": [
                [[x.tolist() if isinstance(x, np.ndarray) else x for x in turns] for turns in group]
                for group in self.advantages
            ],
            "metrics": dict(self.metrics),
            "messages": {str(g): list(messages) for g, messages in self.messages.items()},
            "engine_weights": dict(self.engine_weights),
            "model_path": self.model_path,
            "total_steps": self.total_steps,
            "random_weights": self.random_weights,
            "whole": self.is_whole,
            "group_sizes": self.group_sizes,
            "run": self.run,
            "reason": self.reason,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(path, durable=False) as aside, zipfile.ZipFile(aside, "w") as archive:

            def add(name: str, data: bytes) -> None:
                archive.writestr(name, data, zipfile.ZIP_DEFLATED, 6)

            add("replay.json", json.dumps(header).encode())
            add("config.yaml", self.config.encode())
            add("arrays.npz", _packed(arrays))
            if self.weights:
                add("weights.npz", _packed(self.weights))
            for name, image in images.items():
                add(f"images/{name}", bytes(image.data))
            for name, data in self.model_files.items():
                add(f"model/{name}", data)

    @classmethod
    def read(cls, path: Path) -> "RecordedStep":
        """Read a file of `save`.

        Raises:
            ConfigError: it is no such file, or one of a later format.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
            header = json.loads(files["replay.json"])
            if header["format"] != FORMAT:
                raise ConfigError(
                    f"{path} has format {header['format']} of replay files, and this version reads "
                    f"{FORMAT}; record the step again, or open it with the version that wrote it"
                )
            arrays = _unpacked(files["arrays.npz"])
            images = {
                name.removeprefix("images/"): ImageRef(name.removeprefix("images/"), data)
                for name, data in files.items()
                if name.startswith("images/")
            }
            groups = tuple(
                _group(n, entry, arrays, images) for n, entry in enumerate(header["groups"])
            )
            minibatches = tuple(_minibatch(entry) for entry in header["minibatches"])
            train_logprobs: dict[TrajectoryNumber, np.ndarray] = {}
            for name, array in arrays.items():
                kind, *number = name.split("/")
                if kind == "train_logprobs":
                    train_logprobs[int(number[0]), int(number[1])] = array
            return cls(
                step=header["step"],
                config=files["config.yaml"].decode(),
                groups=groups,
                minibatches=minibatches,
                advantages=tuple(
                    tuple(tuple(map(_turn_advantage, turns)) for turns in group)
                    for group in header["advantages"]
                ),
                train_logprobs=train_logprobs,
                metrics=header["metrics"],
                messages={int(g): messages for g, messages in header["messages"].items()},
                engine_weights=header["engine_weights"],
                weights=_unpacked(files["weights.npz"]) if "weights.npz" in files else {},
                model_path=header["model_path"],
                model_files={
                    name.removeprefix("model/"): data
                    for name, data in files.items()
                    if name.startswith("model/")
                },
                total_steps=header["total_steps"],
                random_weights=header["random_weights"],
                is_whole=header["whole"],
                group_sizes=tuple(header["group_sizes"]),
                run=header["run"],
                reason=header["reason"],
            )
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
            raise ConfigError(
                f"{path} is no replay file ({type(error).__name__}: {error}); "
                "'rlinf-vl replay RUN --step N' writes one"
            ) from None


def replay_path(run_dir: Path, step: int) -> Path:
    """Return the path at which a run writes a step by itself."""
    return run_dir / FOLDER / f"step_{step}{SUFFIX}"


def _turn_advantage(entry: float | list[float]) -> float | np.ndarray:
    """Return the advantage of a turn, or those of its tokens, from its entry in a header."""
    return np.array(entry, np.float32) if isinstance(entry, list) else entry


def write_replay(
    run_dir: Path,
    model_path: str,
    step: int,
    groups: Mapping[int, Group],
    advantages: Sequence[Sequence[TurnAdvantages]],
    train_logprobs: Mapping[TrajectoryNumber, np.ndarray],
    reason: str,
    *,
    total_steps: int,
    weights: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Path | None:
    """Write groups of a step that a run has found fault with; None if its folder has its share of
    such files.

    Without `weights` before the step, a replay computes them again from the run's checkpoints. The
    file's mini-batch has the groups one by one, and its denominator counts their tokens alone.
    """
    folder = run_dir / FOLDER
    files = list(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    path = replay_path(run_dir, step)
    full = len(files) >= MAX_FILES or sum(f.stat().st_size for f in files) >= MAX_BYTES
    if full and path not in files:
        return None
    numbers = sorted(groups)
    micro_batches: list[tuple[TrajectoryNumber, ...]] = []
    n_tokens = 0
    for n, g in enumerate(numbers):
        trained = []
        for i, trajectory in enumerate(groups[g].trajectories):
            if trajectory.error is None and any(s.loss_mask.any() for s in trajectory.sequences):
                trained.append((n, i))
                n_tokens += sum(int(s.loss_mask.sum()) for s in trajectory.sequences)
        micro_batches.append(tuple(trained))
    used = tuple(items for items in micro_batches if items)
    place = {g: n for n, g in enumerate(numbers)}
    recorded = RecordedStep(
        step,
        (run_dir / "config.yaml").read_text(encoding="utf-8"),
        tuple(groups[g] for g in numbers),
        (PlannedMiniBatch(used, max(1, n_tokens)),) if used else (),
        tuple(tuple(tuple(turns) for turns in advantages[g]) for g in numbers),
        train_logprobs={(place[g], i): x for (g, i), x in train_logprobs.items() if g in place},
        weights=weights,
        model_path=model_path,
        model_files=model_files(Path(model_path)),
        total_steps=total_steps,
        is_whole=False,
        run=str(run_dir.resolve()),
        reason=reason,
    )
    recorded.save(path)
    return path


def model_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a model's folder that a replay needs beside its weights; {} if they are
    too large for the file, or on the hub."""
    # Tokenizers, templates and processors; a file "model….json" is an index of weights.
    endings = {".json", ".jinja", ".txt", ".model", ".tiktoken"}
    files = {
        path.name: path.read_bytes()
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.suffix in endings and not path.match("model*.json")
    }
    return files if sum(map(len, files.values())) <= MAX_MODEL_FILE_BYTES else {}


def _minibatch(entry: Mapping[str, Any]) -> PlannedMiniBatch:
    micro_batches = tuple(
        tuple((g, i) for g, i in micro_batch) for micro_batch in entry["micro_batches"]
    )
    return PlannedMiniBatch(micro_batches, entry["denominator"])


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **dict(arrays))  # pyright: ignore[reportArgumentType]  # its stub wants bools
    return file.getvalue()


def _unpacked(data: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _group_entry(
    number: int, group: Group, arrays: dict[str, np.ndarray], images: dict[str, ImageRef]
) -> dict[str, Any]:
    """Return the JSON of a group; its arrays and images are added to `arrays` and `images`."""
    trajectories = []
    for i, trajectory in enumerate(group.trajectories):
        sequences = []
        for k, sequence in enumerate(trajectory.sequences):
            for name, array in sequence.arrays().items():
                arrays[f"{number}/{i}/{k}/{name}"] = array
            images.update({image.hash: image for image, _ in sequence.images})
            sequences.append([[image.hash, list(grid)] for image, grid in sequence.images])
        entry = {
            name: getattr(trajectory, name)
            for name in ("reward", "reward_parts", "status", "correct", "error", "corrupted")
        }
        turns = [asdict(turn) for turn in trajectory.turns]
        trajectories.append(entry | {"sequences": sequences, "turns": turns})
    images.update({image.hash: image for image in group.corrupted_images.values()})
    return {
        "id": group.id,
        "problem_id": group.problem_id,
        "prefix_length": group.prefix_length,
        "answer": group.answer,
        "labels": group.labels,
        "corrupted_images": {name: image.hash for name, image in group.corrupted_images.items()},
        "trajectories": trajectories,
    }


def _group(
    number: int,
    entry: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    images: Mapping[str, ImageRef],
) -> Group:
    """Return the group of an entry of `_group_entry`."""
    own_arrays = ("ids", "loss_mask", "logprobs", "versions")
    trajectories = []
    for i, row in enumerate(entry["trajectories"]):
        row = dict(row)
        sequences = []
        for k, grids in enumerate(row.pop("sequences")):
            prefix = f"{number}/{i}/{k}/"
            columns = {
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
            fields = {name: columns.pop(name, None) for name in own_arrays}
            sequence_images = tuple((images[name], (t, h, w)) for name, (t, h, w) in grids)
            sequences.append(TokenSequence(**fields, images=sequence_images, columns=columns))  # pyright: ignore[reportArgumentType]
        turns = tuple(Turn(**turn) for turn in row.pop("turns"))
        trajectories.append(Trajectory(tuple(sequences), turns, **row))
    return Group(
        entry["id"],
        entry["problem_id"],
        entry["prefix_length"],
        tuple(trajectories),
        entry["answer"],
        {name: images[image_hash] for name, image_hash in entry["corrupted_images"].items()},
        entry["labels"],
    )
