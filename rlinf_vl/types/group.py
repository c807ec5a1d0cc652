"""The trajectories of one problem: their group, and its compact pickle."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import starmap
from typing import Any, TypeAlias

import numpy as np

from rlinf_vl.types.problem import Grid, ImageRef
from rlinf_vl.types.trajectory import TokenSequence, Trajectory, Turn

#: Per-token arrays that are constant where nothing was sampled; they aren't sent for the prefix.
_NOT_SAMPLED = {"loss_mask": False, "logprobs": 0.0, "versions": -1}


#: A reference to an object that another process may hold: a `ray.ObjectRef`, or in a run without
#: Ray (`cluster.backend: local`) the object itself.
Reference: TypeAlias = Any
#: dtype of a per-token array, and the shape of one token's value.
_Kind = tuple[str, tuple[int, ...]]


def _kinds(sequence: TokenSequence) -> dict[str, _Kind]:
    return {name: (array.dtype.str, array.shape[1:]) for name, array in sequence.arrays().items()}


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one problem.

    All sequences begin with the same `prefix_length` tokens and images, none of them sampled, and
    have columns of the same names. The first sequence's columns of the prefix stand for all
    sequences: an engine computes a prompt once, or several times up to rounding.

    A pickle holds the prefix and each distinct image once, and all arrays in one buffer.
    """

    id: str
    problem_id: str
    prefix_length: int
    trajectories: tuple[Trajectory, ...] = field(repr=False)
    answer: str = ""
    #: The images that its corrupted trajectories saw, by the hash of the original image.
    corrupted_images: dict[str, ImageRef] = field(default_factory=dict)
    labels: dict[str, str | float] = field(default_factory=dict)  # `Problem.labels`

    def __post_init__(self) -> None:
        fields, prefix = self._fields(), self.prefix
        for sequence in self.sequences:
            assert np.array_equal(sequence.ids[: self.prefix_length], prefix), (
                "sequences have different prefixes"
            )
            assert not sequence.loss_mask[: self.prefix_length].any(), (
                "a token of the prefix was sampled"
            )
            sequence_fields = _kinds(sequence)
            assert sequence_fields == fields, (
                f"one sequence has {fields}, another {sequence_fields}"
            )

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        return tuple(
            sequence for trajectory in self.trajectories for sequence in trajectory.sequences
        )

    @property
    def prefix(self) -> np.ndarray:
        """The token ids with which all sequences begin, int32 [prefix_length]."""
        return (
            self.sequences[0].ids[: self.prefix_length] if self.sequences else np.zeros(0, np.int32)
        )

    @property
    def images(self) -> tuple[tuple[ImageRef, Grid], ...]:
        """The distinct images with their grids, in order of appearance."""
        return tuple(
            {image.hash: (image, grid) for s in self.sequences for image, grid in s.images}.values()
        )

    @property
    def array_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def with_images(self, images: Mapping[str, Any]) -> "Group":
        """Return the group with its images replaced by `images`, a mapping by hash."""
        trajectories = []
        for trajectory in self.trajectories:
            sequences = tuple(sequence.with_images(images) for sequence in trajectory.sequences)
            trajectories.append(replace(trajectory, sequences=sequences))
        return replace(self, trajectories=tuple(trajectories))

    def as_seen(self, trajectory: Trajectory) -> Trajectory:
        """Return one of its trajectories with the images on which its answers were sampled."""
        if not trajectory.corrupted:
            return trajectory
        return replace(
            trajectory,
            sequences=tuple(s.with_images(self.corrupted_images) for s in trajectory.sequences),
        )

    def _fields(self) -> dict[str, "_Kind"]:
        """Return dtype and shape of the per-token arrays, by name."""
        return _kinds(self.sequences[0]) if self.sequences else {}

    def _arrays(self) -> list[np.ndarray]:
        """Return the arrays in a pickle: those of the prefix, then the rest of each sequence."""
        sequences, fields, start = self.sequences, self._fields(), self.prefix_length
        prefix = [
            sequences[0].arrays()[name][:start] for name in fields if name not in _NOT_SAMPLED
        ]
        return prefix + [s.arrays()[name][start:] for s in sequences for name in fields]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        images = tuple(image for image, _ in self.images)
        number = {image.hash: i for i, image in enumerate(images)}
        # Pickle writes one object once, however often it is referred to; equal ones several times.
        unique_images: dict[tuple, tuple] = {}
        rows = []
        for t in self.trajectories:
            sequences = []
            for sequence in t.sequences:
                sequence_images = tuple(
                    (number[image.hash], grid) for image, grid in sequence.images
                )
                sequences.append(
                    (
                        len(sequence.ids) - self.prefix_length,
                        unique_images.setdefault(sequence_images, sequence_images),
                    )
                )
            turns = tuple(map(astuple, t.turns))
            rows.append(
                (
                    sequences, turns, t.reward, t.reward_parts, t.status, t.correct,
                    t.error, t.metrics, t.cuts, t.corrupted, t.ungraded, t.penalized,
                    t.scores, t.base_reward, t.teacher_prompt, t.token_rewards,
                )
            )  # fmt: skip
        buffer = np.concatenate(
            [np.zeros(0, np.uint8), *(array.reshape(-1).view(np.uint8) for array in self._arrays())]
        )
        # Protocol 5 passes the buffer on without a copy; older ones have no out-of-band buffers.
        packed = pickle.PickleBuffer(buffer.data) if protocol >= 5 else buffer.tobytes()
        return _load_group, (
            self.id, self.problem_id, self.answer, self.prefix_length,
            self.corrupted_images, self.labels, self._fields(), images, tuple(rows), packed,
        )  # fmt: skip


def _load_group(
    group_id: str,
    problem_id: str,
    answer: str,
    prefix_length: int,
    corrupted_images: dict,
    labels: dict,
    fields,
    images,
    rows,
    packed,
) -> Group:
    """Rebuild a group from the arguments that `Group.__reduce_ex__` returns."""
    offset = 0

    def read(kind: _Kind, n: int) -> np.ndarray:
        nonlocal offset
        array = np.frombuffer(packed, kind[0], n * math.prod(kind[1]), offset)
        offset += array.nbytes
        return array.reshape(n, *kind[1])

    # The order of reading is that of `Group._arrays`.
    prefix = {
        name: read(kind, prefix_length) for name, kind in fields.items() if name not in _NOT_SAMPLED
    }
    for name in fields.keys() & _NOT_SAMPLED:
        prefix[name] = np.full(prefix_length, _NOT_SAMPLED[name], fields[name][0])
    trajectories = []
    for (
        sequence_rows, turns, reward, reward_parts, status, correct, error, metrics,
        cuts, corrupted, ungraded, penalized, scores, base_reward,
        teacher_prompt, token_rewards,
    ) in rows:  # fmt: skip
        sequences = []
        for n, sequence_images in sequence_rows:
            columns = {
                name: np.concatenate([prefix[name], read(kind, n)]) for name, kind in fields.items()
            }
            arrays: dict[str, Any] = {
                name: columns.pop(name, None) for name in ("ids", *_NOT_SAMPLED)
            }
            image_grids = tuple((images[i], grid) for i, grid in sequence_images)
            sequences.append(TokenSequence(**arrays, images=image_grids, columns=columns))
        trajectories.append(
            Trajectory(
                tuple(sequences), tuple(starmap(Turn, turns)), reward, reward_parts,
                status, correct, error, metrics, cuts, corrupted, ungraded, penalized,
                scores, base_reward, teacher_prompt, token_rewards,
            )
        )  # fmt: skip
    return Group(
        group_id, problem_id, prefix_length, tuple(trajectories), answer, corrupted_images, labels
    )
