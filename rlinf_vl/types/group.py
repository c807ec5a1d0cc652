"""The trajectories of one problem, how they travel, and what the controller learns of them."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from rlinf_vl.types.problem import UNGRADABLE, Grid, ImageRef
from rlinf_vl.types.trajectory import TokenSequence, Trajectory, Turn, distinct_tokens

#: Per-token arrays that are constant where nothing was sampled, and so aren't sent for a group's prefix.
_NOT_SAMPLED = {"loss_mask": False, "logprobs": 0.0, "versions": -1}


#: dtype of a per-token array, and the shape of what one token has.
_Kind = tuple[str, tuple[int, ...]]


def _kinds(sequence: TokenSequence) -> dict[str, _Kind]:
    return {name: (array.dtype.str, array.shape[1:]) for name, array in sequence.arrays().items()}


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one problem. All their sequences begin with the same `prefix_length` tokens, images and columns,
    none of them sampled, and have columns of the same names.

    The first sequence's routes of the prefix stand for all: engines compute a prompt once, or alike but for rounding.

    Pickled, the prefix and each distinct image are written once, and all arrays are one buffer.
    """

    id: str
    problem_id: str
    prefix_length: int
    trajectories: tuple[Trajectory, ...] = field(repr=False)
    answer: str = ""
    #: What its corrupted trajectories saw, by the image's own hash.
    shown: dict[str, ImageRef] = field(default_factory=dict)
    labels: dict[str, str | float] = field(default_factory=dict)  # its problem's

    def __post_init__(self) -> None:
        fields, prefix = self._fields(), self.prefix
        for sequence in self.sequences:
            assert np.array_equal(sequence.ids[: self.prefix_length], prefix), "sequences have different prefixes"
            assert not sequence.loss_mask[: self.prefix_length].any(), "a token of the prefix was sampled"
            own = _kinds(sequence)
            assert own == fields, f"one sequence has {fields}, another {own}"

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        return tuple(sequence for trajectory in self.trajectories for sequence in trajectory.sequences)

    @property
    def prefix(self) -> np.ndarray:
        """Token ids that all sequences begin with, int32 [prefix_length]."""
        return self.sequences[0].ids[: self.prefix_length] if self.sequences else np.zeros(0, np.int32)

    @property
    def images(self) -> tuple[tuple[ImageRef, Grid], ...]:
        """Distinct images with their grids, in order of appearance."""
        return tuple({image.hash: (image, grid) for s in self.sequences for image, grid in s.images}.values())

    @property
    def array_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def with_images(self, images: Mapping[str, Any]) -> "Group":
        """The same group with these objects in place of its images, by hash."""

        trajectories = (
            replace(t, sequences=tuple(s.with_images(images) for s in t.sequences)) for t in self.trajectories
        )
        return replace(self, trajectories=tuple(trajectories))

    def as_seen(self, trajectory: Trajectory) -> Trajectory:
        """One of its trajectories with the images that its answers were drawn on."""
        if not trajectory.corrupted:
            return trajectory
        return replace(trajectory, sequences=tuple(s.with_images(self.shown) for s in trajectory.sequences))

    def _fields(self) -> dict[str, "_Kind"]:
        """Per-token arrays by name."""
        return _kinds(self.sequences[0]) if self.sequences else {}

    def _arrays(self) -> list[np.ndarray]:
        """Everything that is sent of the arrays: the prefix, then what follows it in each sequence."""
        sequences, fields, start = self.sequences, self._fields(), self.prefix_length
        prefix = [sequences[0].arrays()[name][:start] for name in fields if name not in _NOT_SAMPLED]
        return prefix + [s.arrays()[name][start:] for s in sequences for name in fields]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        images = tuple(image for image, _ in self.images)
        number = {image.hash: i for i, image in enumerate(images)}
        shown: dict[tuple, tuple] = {}  # pickle writes an object once however often it is named
        rows = []
        for t in self.trajectories:
            sequences = []
            for sequence in t.sequences:
                places = tuple((number[image.hash], grid) for image, grid in sequence.images)
                sequences.append((len(sequence.ids) - self.prefix_length, shown.setdefault(places, places)))
            turns = tuple(map(astuple, t.turns))
            facts = (
                t.reward, t.reward_parts, t.status, t.correct, t.error, t.metrics, t.cuts, t.corrupted, t.ungraded, t.penalized
            )  # fmt: skip
            rows.append((sequences, turns, *facts))
        buffer = np.concatenate(
            [np.zeros(0, np.uint8), *(array.reshape(-1).view(np.uint8) for array in self._arrays())]
        )
        packed = pickle.PickleBuffer(buffer.data) if protocol >= 5 else buffer.tobytes()
        head = (self.id, self.problem_id, self.answer, self.prefix_length, self.shown, self.labels)
        return _load_group, (*head, self._fields(), images, tuple(rows), packed)


def _load_group(
    group_id: str,
    problem_id: str,
    answer: str,
    prefix_length: int,
    shown: dict,
    labels: dict,
    fields,
    images,
    rows,
    packed,
) -> Group:
    """The inverse of `Group.__reduce_ex__`."""
    offset = 0

    def read(kind: _Kind, n: int) -> np.ndarray:
        nonlocal offset
        array = np.frombuffer(packed, kind[0], n * math.prod(kind[1]), offset)
        offset += array.nbytes
        return array.reshape(n, *kind[1])

    prefix = {name: read(kind, prefix_length) for name, kind in fields.items() if name not in _NOT_SAMPLED}
    for name in fields.keys() & _NOT_SAMPLED:
        prefix[name] = np.full(prefix_length, _NOT_SAMPLED[name], fields[name][0])
    trajectories = []
    for lengths, turns, *rest in rows:
        sequences = []
        for n, places in lengths:
            columns = {name: np.concatenate([prefix[name], read(kind, n)]) for name, kind in fields.items()}
            own: dict[str, Any] = {name: columns.pop(name, None) for name in ("ids", "routes", *_NOT_SAMPLED)}
            own_images = tuple((images[i], grid) for i, grid in places)
            sequences.append(TokenSequence(**own, images=own_images, columns=columns))
        trajectories.append(Trajectory(tuple(sequences), tuple(Turn(*turn) for turn in turns), *rest))
    return Group(group_id, problem_id, prefix_length, tuple(trajectories), answer, shown, labels)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """All that the controller learns of a group: numbers, no tokens, no pixels. Tuples have one entry per trajectory."""

    id: str
    problem_id: str
    prompt_tokens: int  # length of the prefix that all trajectories share
    tokens: tuple[int, ...]  # length with the prefix; what several sequences of a trajectory share counts once
    response_tokens: tuple[int, ...]  # sampled ones; one in several sequences counts for each
    rewards: tuple[float, ...]
    correct: tuple[bool, ...]
    statuses: tuple[str, ...]
    errors: tuple[str | None, ...]
    min_version: int
    max_version: int
    images: int  # distinct ones of all trajectories
    patches: int  # theirs
    image_bytes: dict[str, int]  # encoded bytes of each by hash, those that corrupted trajectories saw included
    array_bytes: int = 0
    object_bytes: int = 0  # in the object store: the group, and each image that no group before it had stored
    ungradable: int = 0  # responses that a reward function came to no verdict on
    ungraded: tuple[str, ...] = ()  # why
    turns: tuple[int, ...] = ()  # answers of each
    metrics: tuple[dict[str, float], ...] = ()  # `Trajectory.metrics` of each
    #: Since its worker's last group: seconds with work for the engine, and all.
    engine_seconds: tuple[float, float] = (0.0, 0.0)
    prefilled_tokens: int = 0  # by its worker's engine, since the worker's last group
    hung_calls: int = 0  # calls of environments that hung in its worker when it was done
    turn_rewards: tuple[tuple[float, ...], ...] = ()  # of each turn of each
    turn_tokens: tuple[tuple[int, ...], ...] = ()  # sampled in each turn of each
    turn_states: tuple[tuple[str, ...], ...] = ()  # `Turn.state` of each turn of each
    turn_thoughts: tuple[tuple[tuple[int, int, int], ...], ...] = ()  # `Trajectory.turn_thoughts` of each
    cuts: tuple[int, ...] = ()  # `Trajectory.cuts` of each
    corrupted: tuple[bool, ...] = ()  # `Trajectory.corrupted` of each
    version_tokens: dict[int, int] = field(default_factory=dict)  # sampled tokens by the version of their weights
    parts: tuple[dict[str, float], ...] = ()  # `Trajectory.reward_parts` of each, but for `UNGRADABLE`
    penalized: tuple[str, ...] = ()  # `Trajectory.penalized` of those that have one

    @classmethod
    def of(cls, group: Group, image_token_id: int, object_bytes: int = 0) -> "GroupSummary":
        """Summarize a group whose image placeholders are `image_token_id`."""

        seen = np.concatenate([np.zeros(0, np.int32), *(s.versions[s.loss_mask] for s in group.sequences)])
        images = group.images
        return cls(
            id=group.id,
            problem_id=group.problem_id,
            prompt_tokens=group.prefix_length,
            tokens=tuple(
                distinct_tokens(t.sequences, image_token_id) or group.prefix_length for t in group.trajectories
            ),
            response_tokens=tuple(t.n_response_tokens for t in group.trajectories),
            rewards=tuple(float(t.reward) for t in group.trajectories),
            correct=tuple(bool(t.correct) for t in group.trajectories),
            statuses=tuple(t.status for t in group.trajectories),
            errors=tuple(t.error for t in group.trajectories),
            min_version=int(seen.min()) if seen.size else -1,
            max_version=int(seen.max()) if seen.size else -1,
            version_tokens=dict(zip(*(part.tolist() for part in np.unique(seen, return_counts=True)), strict=True)),
            images=len(images),
            patches=sum(math.prod(grid) for _, grid in images),
            image_bytes={i.hash: len(i.data) for i in (*(image for image, _ in images), *group.shown.values())},
            array_bytes=group.array_bytes,
            object_bytes=object_bytes,
            ungradable=sum(UNGRADABLE in t.reward_parts for t in group.trajectories),
            ungraded=tuple(t.ungraded for t in group.trajectories if t.ungraded),
            turns=tuple(len(t.turns) for t in group.trajectories),
            metrics=tuple(t.metrics for t in group.trajectories),
            turn_rewards=tuple(tuple(float(turn.reward) for turn in t.turns) for t in group.trajectories),
            turn_tokens=tuple(t.turn_tokens for t in group.trajectories),
            turn_states=tuple(tuple(turn.state for turn in t.turns) for t in group.trajectories),
            turn_thoughts=tuple(t.turn_thoughts for t in group.trajectories),
            cuts=tuple(t.cuts for t in group.trajectories),
            corrupted=tuple(t.corrupted for t in group.trajectories),
            penalized=tuple(t.penalized for t in group.trajectories if t.penalized),
            parts=tuple(
                {name: part for name, part in t.reward_parts.items() if name != UNGRADABLE} for t in group.trajectories
            ),
        )
