"""What flows between the rooms: frozen dataclasses over bytes and numpy arrays; no torch, no Ray, nothing of ours.

Invariants kept here (`__post_init__` asserts them at every hand-over):
- A trajectory's token arrays are aligned: ids, response mask, logprobs and weight versions have one length.
- What was sampled is what is trained on: ids are never decoded and encoded again.
- An image exists once per group, named by the hash of its encoded bytes.
"""

import hashlib
import pickle
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image: the SHA-256 of its encoded bytes, and those bytes (PNG/JPEG/… exactly as they came), which a memoryview
    gives where they lie in the object store."""

    hash: str
    data: bytes | memoryview = field(repr=False)

    @classmethod
    def of(cls, data: bytes) -> "ImageRef":
        """The image with these encoded bytes."""
        return cls(hashlib.sha256(data).hexdigest(), data)

    @property
    def url(self) -> str:
        return IMAGE_URL_PREFIX + self.hash


@dataclass(frozen=True, slots=True)
class Problem:
    """One dataset row, ready for an environment.

    `id` is unique in its dataset; `messages` name images by `ImageRef.url`; `images` lists them in order of appearance
    (an image that appears twice is listed twice, with one hash).
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled answer, after the prompt that its `Group` holds once. All arrays have shape [R].

    Attributes:
        ids: int32, every token after the group's prompt, in order.
        response_mask: bool, True where the policy sampled the token (False: an environment's observation).
        logprobs: float32, log-probability at the sampling temperature, banned ids left out (0 where not sampled; top-k and
            top-p choose what is drawn and don't change it); None when `rollout.return_logprobs` is off.
        versions: int32, weight version that sampled the token (-1 where not sampled).
        reward: what the environment paid, already scaled to reward_min_val…reward_max_val.
        finish_reason: "stop" (an end token), "length" (cut by max_new_tokens) or "error".
        correct: whether the answer was graded right, before scaling; validation accuracy is its mean.
        error: "kind: reason" where the row, the engine or the environment failed (`ENGINE_FAULT`, `ENVIRONMENT_FAULT`; any
            other kind is the row's); such a trajectory is masked and counted, never trained on.
        reward_parts: what the environment says the reward is made of, by name.
    """

    ids: np.ndarray = field(repr=False)
    response_mask: np.ndarray = field(repr=False)
    logprobs: np.ndarray | None = field(repr=False)
    versions: np.ndarray = field(repr=False)
    reward: float
    finish_reason: str
    correct: bool = False
    error: str | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.ids)
        arrays = {"response_mask": self.response_mask, "versions": self.versions}
        if self.logprobs is not None:
            arrays["logprobs"] = self.logprobs
        for name, array in arrays.items():
            assert array.shape == (length,), f"{name} has shape {array.shape}, ids {self.ids.shape}"

    @property
    def n_response_tokens(self) -> int:
        """Sampled tokens: those that carry loss."""
        return int(self.response_mask.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """The G trajectories of one problem and, once, what they share.

    Pickled, all of its arrays are one uint8 buffer; loaded, they are views of it, read-only where the buffer is.

    Attributes:
        prompt_ids: int32 [P], chat template applied, image placeholders expanded.
        images: the prompt's images in order of their placeholders.
        image_grids: int32 [len(images), 3], (t, h, w) in patches, as the image processor made them.
    """

    id: str
    problem_id: str
    prompt_ids: np.ndarray = field(repr=False)
    images: tuple[ImageRef, ...] = field(repr=False)
    image_grids: np.ndarray = field(repr=False)
    trajectories: tuple[Trajectory, ...] = field(repr=False)
    answer: str = ""

    def __post_init__(self) -> None:
        assert self.prompt_ids.ndim == 1, self.prompt_ids.shape
        assert self.image_grids.shape == (len(self.images), 3), (self.image_grids.shape, len(self.images))

    def _arrays(self) -> list[tuple[np.ndarray, type]]:
        """Every array with its dtype, wider items first, so that end to end all are aligned."""
        out: list[tuple[np.ndarray, type]] = [(self.prompt_ids, np.int32), (self.image_grids, np.int32)]
        for t in self.trajectories:
            out += [(t.ids, np.int32), (t.versions, np.int32)]
            out += [] if t.logprobs is None else [(t.logprobs, np.float32)]
        return out + [(t.response_mask, np.bool_) for t in self.trajectories]

    @property
    def array_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.size * np.dtype(dtype).itemsize for array, dtype in self._arrays())

    def __reduce_ex__(self, protocol: Any) -> tuple:
        flat = [array.reshape(-1).astype(dtype, copy=False).view(np.uint8) for array, dtype in self._arrays()]
        rows = [
            (len(t.ids), t.logprobs is not None, t.reward, t.finish_reason, t.correct, t.error, t.reward_parts)
            for t in self.trajectories
        ]
        sizes = (len(self.prompt_ids), tuple(zip(*rows, strict=True)))
        buffer = np.concatenate(flat)  # not as an array, whose description takes 100 bytes
        packed = pickle.PickleBuffer(buffer.data) if protocol >= 5 else buffer.tobytes()
        return _load_group, (self.id, self.problem_id, self.answer, self.images, *sizes, packed)


def _load_group(name, problem, answer, images, prompt_tokens: int, columns: tuple, packed: bytes | memoryview) -> Group:
    """The inverse of `Group.__reduce_ex__`."""
    buffer, offset = np.frombuffer(packed, np.uint8), 0

    def take(n: int, dtype: type) -> np.ndarray:
        nonlocal offset
        start, offset = offset, offset + n * np.dtype(dtype).itemsize
        return buffer[start:offset].view(dtype)

    prompt_ids, grids = take(prompt_tokens, np.int32), take(3 * len(images), np.int32).reshape(-1, 3)
    rows = list(zip(*columns, strict=True))
    arrays = [
        (take(n, np.int32), take(n, np.int32), take(n, np.float32) if has_logprobs else None)
        for n, has_logprobs, *_ in rows
    ]
    trajectories = tuple(
        Trajectory(ids, take(n, np.bool_), logprobs, versions, *rest)
        for (n, _, *rest), (ids, versions, logprobs) in zip(rows, arrays, strict=True)
    )
    return Group(name, problem, prompt_ids, images, grids, trajectories, answer)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """All that the controller learns of a group: numbers, no tokens, no pixels. One tuple entry per trajectory.

    Attributes:
        image_bytes: encoded bytes of each distinct image, by hash.
        array_bytes: bytes of the group's arrays.
        object_bytes: what the group, and each image that no group before it had stored, take in the object store.
        ungradable: responses that could not be graded within the grader's limits.
    """

    id: str
    problem_id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    rewards: tuple[float, ...]
    correct: tuple[bool, ...]
    finish_reasons: tuple[str, ...]
    errors: tuple[str | None, ...]
    min_version: int
    max_version: int
    images: int
    patches: int
    image_bytes: dict[str, int]
    array_bytes: int = 0
    object_bytes: int = 0
    ungradable: int = 0

    @classmethod
    def of(cls, group: Group, object_bytes: int = 0) -> "GroupSummary":
        """`tokens[i]` is the trajectory's whole length (prompt and what follows), `response_tokens[i]` its sampled part."""
        versions = [t.versions[t.response_mask] for t in group.trajectories]
        seen = np.concatenate(versions) if versions else np.zeros(0, np.int32)
        prompt = len(group.prompt_ids)
        return cls(
            id=group.id,
            problem_id=group.problem_id,
            prompt_tokens=prompt,
            tokens=tuple(prompt + len(t.ids) for t in group.trajectories),
            response_tokens=tuple(t.n_response_tokens for t in group.trajectories),
            rewards=tuple(float(t.reward) for t in group.trajectories),
            correct=tuple(bool(t.correct) for t in group.trajectories),
            finish_reasons=tuple(t.finish_reason for t in group.trajectories),
            errors=tuple(t.error for t in group.trajectories),
            min_version=int(seen.min()) if seen.size else -1,
            max_version=int(seen.max()) if seen.size else -1,
            images=len(group.images),
            patches=int(group.image_grids.prod(axis=1).sum()),
            image_bytes={image.hash: len(image.data) for image in group.images},
            array_bytes=group.array_bytes,
            object_bytes=object_bytes,
            ungradable=sum(UNGRADABLE in t.reward_parts for t in group.trajectories),
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
    """One prompt for an engine: `len(seeds)` samples are drawn, sample i from its own stream `seeds[i]`.

    `ids` is int32 [P] with image placeholders already expanded; `images` follow their order, and `image_grids`
    (int32 [n, 3]) is what the placeholder counts were made from.
    """

    ids: np.ndarray = field(repr=False)
    images: tuple[ImageRef, ...] = field(repr=False)
    image_grids: np.ndarray = field(repr=False)
    sampling: SamplingParams
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation. ids int32 [R], logprobs float32 [R] (see `Trajectory`), versions int32 [R]."""

    ids: np.ndarray = field(repr=False)
    logprobs: np.ndarray = field(repr=False)
    versions: np.ndarray = field(repr=False)
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answers to one `Request`: one `Sample` per seed, in order."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row for the trainer: S segments end to end, T tokens, R response tokens, N image tokens.

    A segment is a whole trajectory, or a prompt that stands once and is followed by its responses, or such a response.

    Attributes:
        ids: int64 [T].
        positions: int64 [4, T], rows (text, t, h, w); a response goes on where its prompt ends.
        cu_seqlens: int64 [S + 1], segment boundaries 0 … T (padding, if any, is the last segment).
        prefix: int64 [S], the segment that each continues (a response its prompt), -1 where it stands alone.
        predict: int64 [R], row positions whose hidden state predicts a response token.
        targets: int64 [R], those response tokens.
        trajectories: int64 [R], which trajectory of the micro-batch each belongs to, 0, 1, …
        advantages: float32 [R].
        rollout_logprobs: float32 [R], or None when the engine returned none.
        images: hashes of the distinct images.
        pixel_values: float32 [P, d], their patches; None without images, and where features take their place.
        grids: int64 [n, 3], (t, h, w) of those images.
        image_positions: int64 [N], row positions of image placeholders.
        image_features: int64 [N], which row of the images' features stands at each.
        run_vision: whether the vision tower must be called (on a blank patch if there is no image), because
            another rank calls it in this micro-step.
    """

    ids: np.ndarray = field(repr=False)
    positions: np.ndarray = field(repr=False)
    cu_seqlens: np.ndarray = field(repr=False)
    prefix: np.ndarray = field(repr=False)
    predict: np.ndarray = field(repr=False)
    targets: np.ndarray = field(repr=False)
    trajectories: np.ndarray = field(repr=False)
    advantages: np.ndarray = field(repr=False)
    rollout_logprobs: np.ndarray | None = field(repr=False)
    images: tuple[str, ...] = field(repr=False)
    pixel_values: np.ndarray | None = field(repr=False)
    grids: np.ndarray = field(repr=False)
    image_positions: np.ndarray = field(repr=False)
    image_features: np.ndarray = field(repr=False)
    run_vision: bool = False

    def __post_init__(self) -> None:
        assert self.positions.shape == (4, len(self.ids))
        assert len(self.prefix) == len(self.cu_seqlens) - 1
        assert len(self.predict) == len(self.targets) == len(self.trajectories) == len(self.advantages)
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
