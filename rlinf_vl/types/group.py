"""The trajectories of one problem: their group, its compact pickle, and its summary."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import starmap
from typing import Any

import numpy as np

from rlinf_vl.types.problem import UNGRADABLE, Grid, ImageRef
from rlinf_vl.types.trajectory import TokenSequence, Trajectory, Turn, distinct_tokens

#: Per-token arrays that are constant where nothing was sampled; they aren't sent for the prefix.
_NOT_SAMPLED = {"loss_mask": False, "logprobs": 0.0, "versions": -1}


#: dtype of a per-token array, and the shape of one token's value.
_Kind = tuple[str, tuple[int, ...]]


def _kinds(sequence: TokenSequence) -> dict[str, _Kind]:
    return {name: (array.dtype.str, array.shape[1:]) for name, array in sequence.arrays().items()}


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one problem.

    All sequences begin with the same `prefix_length` tokens, images and columns, none of them
    sampled, and have columns of the same names. The first sequence's routes of the prefix stand for
    all sequences: an engine computes a prompt once, or several times up to rounding.

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
        cuts, corrupted, ungraded, penalized,
    ) in rows:  # fmt: skip
        sequences = []
        for n, sequence_images in sequence_rows:
            columns = {
                name: np.concatenate([prefix[name], read(kind, n)]) for name, kind in fields.items()
            }
            arrays: dict[str, Any] = {
                name: columns.pop(name, None) for name in ("ids", "routes", *_NOT_SAMPLED)
            }
            image_grids = tuple((images[i], grid) for i, grid in sequence_images)
            sequences.append(TokenSequence(**arrays, images=image_grids, columns=columns))
        trajectories.append(
            Trajectory(
                tuple(sequences), tuple(starmap(Turn, turns)), reward, reward_parts,
                status, correct, error, metrics, cuts, corrupted, ungraded, penalized,
            )
        )  # fmt: skip
    return Group(
        group_id, problem_id, prefix_length, tuple(trajectories), answer, corrupted_images, labels
    )


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The figures of a group that the controller gets, without tokens and pixels.

    Tuples have one entry per trajectory, unless a comment says otherwise.
    """

    id: str
    problem_id: str
    prompt_tokens: int  # length of the prefix that all trajectories share
    tokens: tuple[int, ...]  # prefix included; shared tokens of a trajectory count once
    response_tokens: tuple[int, ...]  # sampled tokens; one in several sequences counts for each
    rewards: tuple[float, ...]
    correct: tuple[bool, ...]
    statuses: tuple[str, ...]
    errors: tuple[str | None, ...]
    min_version: int
    max_version: int
    images: int  # distinct images of all trajectories
    patches: int  # patches of those images
    #: Encoded bytes of each image by hash, including those that corrupted trajectories saw.
    image_bytes: dict[str, int]
    array_bytes: int = 0
    #: Bytes in the object store: of the group, and of each image that no earlier group had stored.
    object_bytes: int = 0
    ungradable: int = 0  # the number of responses that a reward function could not grade
    ungraded: tuple[str, ...] = ()  # the reasons why; one entry per such response
    turns: tuple[int, ...] = ()  # number of answers
    metrics: tuple[dict[str, float], ...] = ()  # `Trajectory.metrics`
    #: Not per trajectory: seconds in which the engine had work, and all seconds, since the worker's
    #: last group.
    engine_seconds: tuple[float, float] = (0.0, 0.0)
    prefilled_tokens: int = 0  # by the worker's engine, since the worker's last group
    hung_calls: int = 0  # environment calls hanging in the worker when the group was finished
    turn_rewards: tuple[tuple[float, ...], ...] = ()  # `Trajectory.turn_rewards`
    turn_tokens: tuple[tuple[int, ...], ...] = ()  # `Trajectory.turn_tokens`
    turn_states: tuple[tuple[str, ...], ...] = ()  # `Trajectory.turn_states`
    turn_thoughts: tuple[tuple[tuple[int, int, int], ...], ...] = ()  # `Trajectory.turn_thoughts`
    cuts: tuple[int, ...] = ()  # `Trajectory.cuts`
    corrupted: tuple[bool, ...] = ()  # `Trajectory.corrupted`
    #: Number of sampled tokens by the version of the weights that sampled them.
    version_tokens: dict[int, int] = field(default_factory=dict)
    parts: tuple[dict[str, float], ...] = ()  # `Trajectory.reward_parts` without `UNGRADABLE`
    penalized: tuple[str, ...] = ()  # `Trajectory.penalized`; one entry per penalized trajectory

    @classmethod
    def of(cls, group: Group, image_token_id: int, object_bytes: int = 0) -> "GroupSummary":
        """Summarize a group; `image_token_id` is the id of image placeholders."""
        versions = np.concatenate(
            [np.zeros(0, np.int32), *(s.versions[s.loss_mask] for s in group.sequences)]
        )
        distinct_versions, version_counts = np.unique(versions, return_counts=True)
        images = group.images
        all_images = [image for image, _ in images] + list(group.corrupted_images.values())
        parts = []
        for trajectory in group.trajectories:
            parts.append(
                {name: part for name, part in trajectory.reward_parts.items() if name != UNGRADABLE}
            )
        return cls(
            id=group.id,
            problem_id=group.problem_id,
            prompt_tokens=group.prefix_length,
            tokens=tuple(
                distinct_tokens(t.sequences, image_token_id) or group.prefix_length
                for t in group.trajectories
            ),
            response_tokens=tuple(t.n_response_tokens for t in group.trajectories),
            rewards=tuple(float(t.reward) for t in group.trajectories),
            correct=tuple(bool(t.correct) for t in group.trajectories),
            statuses=tuple(t.status for t in group.trajectories),
            errors=tuple(t.error for t in group.trajectories),
            min_version=int(versions.min()) if versions.size else -1,
            max_version=int(versions.max()) if versions.size else -1,
            version_tokens=dict(
                zip(distinct_versions.tolist(), version_counts.tolist(), strict=True)
            ),
            images=len(images),
            patches=sum(math.prod(grid) for _, grid in images),
            image_bytes={image.hash: len(image.data) for image in all_images},
            array_bytes=group.array_bytes,
            object_bytes=object_bytes,
            ungradable=sum(UNGRADABLE in t.reward_parts for t in group.trajectories),
            ungraded=tuple(t.ungraded for t in group.trajectories if t.ungraded),
            turns=tuple(len(t.turns) for t in group.trajectories),
            metrics=tuple(t.metrics for t in group.trajectories),
            turn_rewards=tuple(t.turn_rewards for t in group.trajectories),
            turn_tokens=tuple(t.turn_tokens for t in group.trajectories),
            turn_states=tuple(t.turn_states for t in group.trajectories),
            turn_thoughts=tuple(t.turn_thoughts for t in group.trajectories),
            cuts=tuple(t.cuts for t in group.trajectories),
            corrupted=tuple(t.corrupted for t in group.trajectories),
            penalized=tuple(t.penalized for t in group.trajectories if t.penalized),
            parts=tuple(parts),
        )
