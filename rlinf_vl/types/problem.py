"""What an episode begins with: problems, messages and images."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

#: A chat message in the OpenAI content-part form: {"role": str, "content": str | list of parts}; a part is
#: {"type": "text", "text": str} or {"type": "image_url", "image_url": {"url": "image://<hash>"}}.
Message = dict[str, Any]
#: What "role" may be.
ROLES = ("system", "user", "assistant", "tool")
#: Kinds of `Trajectory.error` that are no fault of the row.
ENGINE_FAULT, ENVIRONMENT_FAULT = "engine", "environment"
#: In `Trajectory.reward_parts` of a response that could not be graded within the grader's limits and is paid as a wrong one.
UNGRADABLE = "ungradable"
#: Longest label of a problem in characters, and most labels.
MAX_LABEL, MAX_LABELS = 64, 16
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
    dropped_images: int = 0  # images of the row beyond data.max_images_per_message and data.max_images_per_sample
    chat: bool = False  # whether the row's prompt is a list of messages

    @property
    def labels(self) -> dict[str, str | float]:
        """Its columns that are short texts or numbers: problems are told apart by them."""
        short = {k: v for k, v in self.columns.items() if isinstance(v, str | int | float) and len(str(v)) <= MAX_LABEL}
        return dict(list(short.items())[:MAX_LABELS])
