"""What flows between the rooms: frozen dataclasses over bytes and numpy arrays; no torch, no Ray, nothing of ours.

Invariants: a sequence's per-token arrays have one length (asserted at every hand-over); sampled ids are trained on as they
are, never decoded and encoded again; an image travels once per group, named by the hash of its encoded bytes.
"""

import hashlib
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

#: A chat message in the OpenAI content-part form: {"role": str, "content": str | list of parts}; a part is
#: {"type": "text", "text": str} or {"type": "image_url", "image_url": {"url": "image://<hash>"}}.
Message = dict[str, Any]
#: Kinds of `Trajectory.error` that are no fault of the row.
ENGINE_FAULT, ENVIRONMENT_FAULT = "engine", "environment"
#: In `Trajectory.reward_parts` of a response that could not be graded within the grader's limits and is paid as a wrong one.
UNGRADABLE = "ungradable"
#: URL scheme under which a message names an `ImageRef` of its problem.
IMAGE_URL_PREFIX = "image://"
#: (t, h, w) of an image in patches.
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image, by content."""

    hash: str  # SHA-256 of its encoded bytes
    data: bytes | memoryview = field(repr=False)  # PNG, JPEG, … exactly as it came; a view of the object store

    @classmethod
    def of(cls, data: bytes) -> "ImageRef":
        return cls(hashlib.sha256(data).hexdigest(), data)

    @property
    def url(self) -> str:
        return IMAGE_URL_PREFIX + self.hash


@dataclass(frozen=True, slots=True)
class Problem:
    """One dataset row, ready for an environment."""

    id: str  # unique in its dataset
    messages: tuple[Message, ...]  # which name images by `ImageRef.url`
    answer: str
    images: tuple[ImageRef, ...] = ()  # in order of appearance; one that appears twice is listed twice
    env_class: str | None = None  # the environment that the row names; None: the run's
    columns: dict[str, Any] = field(default_factory=dict)  # what else the row has, as plain values


@dataclass(frozen=True, slots=True, repr=False)
class TokenSequence:
    """One row that a trainer could train on alone, from the first prompt token on. Arrays have one value per token, [T]."""

    ids: np.ndarray  # int32, image placeholders expanded
    loss_mask: np.ndarray  # bool, True where the policy sampled the token (False: prompt or observation)
    #: float32, log-probability at the sampling temperature with banned ids left out (top-k and top-p restrict the draw and
    #: don't change it), 0 where not sampled; None if `rollout.return_logprobs` is off.
    logprobs: np.ndarray | None
    versions: np.ndarray  # int32, version of the weights that sampled the token, -1 where not sampled
    images: tuple[tuple[ImageRef, Grid], ...] = ()  # in order of their placeholders; one shown twice is listed twice
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # further arrays by name

    def __post_init__(self) -> None:
        for name, array in self.arrays().items():
            assert array.shape == (len(self.ids),), f"{name} has shape {array.shape}, ids {self.ids.shape}"
        assert not self.loss_mask[:1].any(), "nothing predicts the first token, so it can't be a sampled one"

    @classmethod
    def of_sample(cls, request: "Request", sample: "Sample") -> "TokenSequence":
        """A prompt followed by one sample drawn from it; `sample.columns` are 0 on the prompt."""
        prompt = len(request.ids)
        grids = [(int(t), int(h), int(w)) for t, h, w in request.image_grids]
        return cls(
            ids=np.concatenate([request.ids, sample.ids]).astype(np.int32, copy=False),
            loss_mask=np.arange(prompt + len(sample.ids)) >= prompt,
            logprobs=np.concatenate([np.zeros(prompt, np.float32), sample.logprobs]),
            versions=np.concatenate([np.full(prompt, -1, np.int32), sample.versions]),
            images=tuple(zip(request.images, grids, strict=True)),
            columns={n: np.concatenate([np.zeros(prompt, c.dtype), c]) for n, c in sample.columns.items()},
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Every per-token array by name."""
        logprobs = {} if self.logprobs is None else {"logprobs": self.logprobs}
        return {"ids": self.ids, "loss_mask": self.loss_mask, "versions": self.versions} | logprobs | self.columns

    def assert_images_placed(self, image_token_id: int, merge_size: int) -> None:
        """Assert that there are as many placeholder ids as the images need."""
        found = int((self.ids == image_token_id).sum())
        needed = sum(math.prod(grid) for _, grid in self.images) // merge_size**2
        assert found == needed, f"{found} image placeholder ids for {len(self.images)} images that need {needed}"

    def shared_length(self, other: "TokenSequence", image_token_id: int) -> int:
        """How many leading tokens two sequences have in common, images included; an image counts whole or not at all."""
        n = min(len(self.ids), len(other.ids))
        differing = np.flatnonzero(self.ids[:n] != other.ids[:n])
        n = int(differing[0]) if len(differing) else n
        pairs = zip(self.images, other.images, strict=False)
        for k, ((ours, our_grid), (theirs, their_grid)) in enumerate(pairs):
            if ours.hash != theirs.hash or our_grid != their_grid:
                patches = np.cumsum([0, *(math.prod(grid) for _, grid in self.images)])
                placeholders = np.flatnonzero(self.ids == image_token_id)
                return min(n, int(placeholders[len(placeholders) * patches[k] // patches[-1]]))
        return n


def distinct_tokens(sequences: Sequence[TokenSequence], image_token_id: int) -> int:
    """Tokens of the tree of prefixes that these share: a sequence adds what no sequence before it has."""
    total = 0
    for j, sequence in enumerate(sequences):
        shared = (sequence.shared_length(earlier, image_token_id) for earlier in sequences[:j])
        total += len(sequence.ids) - max(shared, default=0)
    return total


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled at once: tokens `start` … `end` of the trajectory's `sequences[sequence]`."""

    sequence: int
    start: int
    end: int
    finish_reason: str
    reward: float
    #: JSON object of the environment's `tool_calls` and `state` (`envs.base.StepResult`); "" if it gave neither.
    info: str = ""

    @property
    def state(self) -> str:
        """Name of the state that it answered to; "" where the environment gave none."""
        return json.loads(self.info).get("state", "") if self.info else ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: a sequence, or several where the context was rewritten on the way."""

    sequences: tuple[TokenSequence, ...] = field(repr=False)  # none if it failed before a token was sampled
    turns: tuple[Turn, ...]
    reward: float  # what the environment paid, scaled to reward_min_val … reward_max_val
    reward_parts: dict[str, float]  # what the environment says the reward is made of, by name
    status: str  # "stop" (an end token), "length" (cut by max_new_tokens) or "error"
    correct: bool = False  # whether the answer was graded right, before scaling; validation accuracy is its mean
    #: "kind: reason" if the row, the engine or the environment failed (`ENGINE_FAULT`, `ENVIRONMENT_FAULT`; any other kind is
    #: the row's); such a trajectory is masked and counted, never trained on.
    error: str | None = None
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # what the environment measured, by name: the last value of each

    def __post_init__(self) -> None:
        for turn in self.turns:
            assert turn.start <= turn.end <= len(self.sequences[turn.sequence].ids), turn

    @property
    def n_response_tokens(self) -> int:
        """Sampled tokens: those that carry loss, in every sequence that has them."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    def turn_numbers(self) -> list[np.ndarray]:
        """Of each sequence, which turn each sampled token is of: int64 [sampled tokens]."""
        numbers = [np.full(len(sequence.ids), -1) for sequence in self.sequences]
        for k, turn in enumerate(self.turns):
            numbers[turn.sequence][turn.start : turn.end] = k
        sampled = [own[s.loss_mask] for own, s in zip(numbers, self.sequences, strict=True)]
        assert all((own >= 0).all() for own in sampled), "a sampled token is of no turn"
        return sampled

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """Sampled tokens of each turn."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self.turn_numbers()])
        return tuple(np.bincount(numbers, minlength=len(self.turns)).tolist())


#: Per-token arrays that are constant where nothing was sampled, and so aren't sent for a group's prefix.
_NOT_SAMPLED = {"loss_mask": False, "logprobs": 0.0, "versions": -1}


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one problem. All their sequences begin with the same `prefix_length` tokens, images and columns,
    none of them sampled, and have columns of the same names.

    Pickled, the prefix and each distinct image are written once, and all arrays are one buffer.
    """

    id: str
    problem_id: str
    prefix_length: int
    trajectories: tuple[Trajectory, ...] = field(repr=False)
    answer: str = ""

    def __post_init__(self) -> None:
        fields, prefix = self._fields(), self.prefix
        for sequence in self.sequences:
            assert np.array_equal(sequence.ids[: self.prefix_length], prefix), "sequences have different prefixes"
            assert not sequence.loss_mask[: self.prefix_length].any(), "a token of the prefix was sampled"
            own = {name: array.dtype.str for name, array in sequence.arrays().items()}
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

        def changed(sequence: TokenSequence) -> TokenSequence:
            return replace(sequence, images=tuple((images.get(i.hash, i), grid) for i, grid in sequence.images))

        trajectories = (replace(t, sequences=tuple(map(changed, t.sequences))) for t in self.trajectories)
        return replace(self, trajectories=tuple(trajectories))

    def _fields(self) -> dict[str, str]:
        """Per-token arrays: name → dtype."""
        return {name: array.dtype.str for s in self.sequences[:1] for name, array in s.arrays().items()}

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
            rows.append((sequences, turns, t.reward, t.reward_parts, t.status, t.correct, t.error, t.metrics))
        buffer = np.concatenate([np.zeros(0, np.uint8), *(array.view(np.uint8) for array in self._arrays())])
        packed = pickle.PickleBuffer(buffer.data) if protocol >= 5 else buffer.tobytes()
        head = (self.id, self.problem_id, self.answer, self.prefix_length)
        return _load_group, (*head, self._fields(), images, tuple(rows), packed)


def _load_group(group_id: str, problem_id: str, answer: str, prefix_length: int, fields, images, rows, packed) -> Group:
    """The inverse of `Group.__reduce_ex__`."""
    offset = 0

    def read(dtype: str, n: int) -> np.ndarray:
        nonlocal offset
        array = np.frombuffer(packed, dtype, n, offset)
        offset += array.nbytes
        return array

    prefix = {name: read(dtype, prefix_length) for name, dtype in fields.items() if name not in _NOT_SAMPLED}
    prefix |= {name: np.full(prefix_length, _NOT_SAMPLED[name], fields[name]) for name in fields.keys() & _NOT_SAMPLED}
    trajectories = []
    for lengths, turns, *rest in rows:
        sequences = []
        for n, places in lengths:
            columns = {name: np.concatenate([prefix[name], read(dtype, n)]) for name, dtype in fields.items()}
            own: dict[str, Any] = {name: columns.pop(name, None) for name in ("ids", *_NOT_SAMPLED)}
            shown = tuple((images[i], grid) for i, grid in places)
            sequences.append(TokenSequence(**own, images=shown, columns=columns))
        trajectories.append(Trajectory(tuple(sequences), tuple(Turn(*turn) for turn in turns), *rest))
    return Group(group_id, problem_id, prefix_length, tuple(trajectories), answer)


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
    image_bytes: dict[str, int]  # encoded bytes of each, by hash
    array_bytes: int = 0
    object_bytes: int = 0  # in the object store: the group, and each image that no group before it had stored
    ungradable: int = 0  # responses that could not be graded within the grader's limits
    turns: tuple[int, ...] = ()  # answers of each
    metrics: tuple[dict[str, float], ...] = ()  # `Trajectory.metrics` of each
    #: Since its worker's last group: seconds with work for the engine, and all.
    engine_seconds: tuple[float, float] = (0.0, 0.0)
    prefilled_tokens: int = 0  # by its worker's engine, since the worker's last group
    turn_rewards: tuple[tuple[float, ...], ...] = ()  # of each turn of each
    turn_tokens: tuple[tuple[int, ...], ...] = ()  # sampled in each turn of each
    turn_states: tuple[tuple[str, ...], ...] = ()  # `Turn.state` of each turn of each

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
            images=len(images),
            patches=sum(math.prod(grid) for _, grid in images),
            image_bytes={image.hash: len(image.data) for image, _ in images},
            array_bytes=group.array_bytes,
            object_bytes=object_bytes,
            ungradable=sum(UNGRADABLE in t.reward_parts for t in group.trajectories),
            turns=tuple(len(t.turns) for t in group.trajectories),
            metrics=tuple(t.metrics for t in group.trajectories),
            turn_rewards=tuple(tuple(float(turn.reward) for turn in t.turns) for t in group.trajectories),
            turn_tokens=tuple(t.turn_tokens for t in group.trajectories),
            turn_states=tuple(tuple(turn.state for turn in t.turns) for t in group.trajectories),
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for an engine: `len(seeds)` samples are drawn, sample i from its own stream `seeds[i]`."""

    ids: np.ndarray = field(repr=False)  # int32 [P], image placeholders expanded
    images: tuple[ImageRef, ...] = field(repr=False)  # in order of their placeholders
    image_grids: np.ndarray = field(repr=False)  # int32 [n, 3], (t, h, w) of each image in patches
    sampling: SamplingParams
    seeds: tuple[int, ...]
    #: One name per seed, or none: the engine may keep what it computed for sample i under `sessions[i]`. The next request of a
    #: session has this one seed, and begins with all ids and images so far, or some where the history was rewritten. Nothing but
    #: speed depends on it.
    sessions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation: ids int32 [R], logprobs float32 [R], versions int32 [R] and columns, see `TokenSequence`."""

    ids: np.ndarray = field(repr=False)
    logprobs: np.ndarray = field(repr=False)
    versions: np.ndarray = field(repr=False)
    finish_reason: str
    columns: dict[str, np.ndarray] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answers to one `Request`: one `Sample` per seed, in order."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, repr=False)
class MicroBatch:
    """One packed row for the trainer: S segments end to end, T tokens, R sampled tokens, N image tokens.

    Segments form trees, in depth-first order: a prompt that stands once is followed by the responses that continue it.
    """

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [4, T], rows (text, t, h, w); a segment goes on where the one it continues ends
    cu_seqlens: np.ndarray  # int64 [S + 1], segment boundaries 0 … T; padding, if any, is the last segment
    prefix: np.ndarray  # int64 [S], the segment that each continues, -1 for none
    predict: np.ndarray  # int64 [R], row positions whose hidden state predicts a sampled token
    targets: np.ndarray  # int64 [R], those tokens
    trajectories: np.ndarray  # int64 [R], which trajectory of the micro-batch each belongs to, 0, 1, …
    turns: (
        np.ndarray
    )  # int64 [R], which turn of the micro-batch each was sampled in; those of a trajectory follow each other
    advantages: np.ndarray  # float32 [R]
    rollout_logprobs: np.ndarray | None  # float32 [R], None if the engine returned none
    columns: dict[str, np.ndarray]  # [R] each, of `TokenSequence.columns`; a row without trajectories has none
    images: tuple[str, ...]  # hashes of the distinct images
    pixel_values: np.ndarray | None  # float32 [P, d], their patches; None without images, or if features replace them
    grids: np.ndarray  # int64 [n, 3], (t, h, w) of those images
    image_positions: np.ndarray  # int64 [N], row positions of image placeholders
    image_features: np.ndarray  # int64 [N], which row of the images' features stands at each
    run_vision: bool = False  # run the tower, on a blank patch without images: another rank does in this micro-step

    def __post_init__(self) -> None:
        assert self.positions.shape == (4, len(self.ids))
        assert len(self.prefix) == len(self.cu_seqlens) - 1
        assert (
            len(self.predict) == len(self.targets) == len(self.trajectories) == len(self.turns) == len(self.advantages)
        )
        assert len(self.image_positions) == len(self.image_features)
        assert self.run_vision or self.pixel_values is None


@dataclass(frozen=True, slots=True)
class Prices:
    """What training costs, in units of one token's linear part in all layers of the language model.

    `attention` is the price of a (query, key) pair, `head` of a token that carries loss, `patch` of a vision patch. The
    defaults are those of Qwen3-VL-2B with a frozen tower: a token's linear part is
    28 × 2048 × (128 × 2 × (16 + 8) + 3 × 6144) = 1.41e9 multiply-adds, a pair 2 × 16 × 128 × 28 = 1.15e5,
    the head 151936 × 2048 = 3.1e8, and a patch's forward 3.3e8, a third of what it would be with its backward.
    """

    attention: float = 8.1e-5
    head: float = 0.22
    patch: float = 0.077
