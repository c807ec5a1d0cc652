"""The input of an episode: problems, messages and images."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

#: A chat message in OpenAI's form: {"role": str, "content": str | list of parts}; a part is
#: {"type": "text", "text": str} or {"type": "image_url", "image_url": {"url": "image://<hash>"}}; a
#: video's is {"type": "video_url", "video_url": {"url": …}}. An assistant's may have `tool_calls` and
#: `reasoning_content`, and a tool's `tool_call_id` and `name`.
Message = dict[str, Any]
#: The allowed values of a message's "role".
ROLES = ("system", "user", "assistant", "tool")
#: Kinds of `Trajectory.error` that the row did not cause.
ENGINE_FAULT, ENVIRONMENT_FAULT = "engine", "environment"
#: Key in `Trajectory.reward_parts` that marks a response which the grader could not grade within
#: its limits; the response counts as wrong.
UNGRADABLE = "ungradable"
#: Maximum length of a problem's label in characters, and maximum number of labels.
MAX_LABEL, MAX_LABELS = 64, 16
#: URL scheme under which a message names an `ImageRef` of its problem.
IMAGE_URL_PREFIX = "image://"
#: (t, h, w) of an image or a video in patches.
Grid = tuple[int, int, int]
#: A token id, or several.
TokenIds = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image, identified by its content."""

    hash: str  # SHA-256 of its encoded bytes
    #: PNG, JPEG, … unchanged; may be a view of the object store.
    data: bytes | memoryview = field(repr=False)

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
    messages: tuple[Message, ...]  # they refer to images by `ImageRef.url`
    answer: str
    images: tuple[
        ImageRef, ...
    ] = ()  # in order of appearance; one that appears twice is listed twice
    env_class: str | None = None  # the environment that the row names; None for the run's
    columns: dict[str, Any] = field(default_factory=dict)  # other columns, as plain values
    dropped_images: int = (
        0  # images of the row beyond data.max_images_per_message and data.max_images_per_sample
    )
    chat: bool = False  # whether the row's prompt is a list of messages
    unused_keys: tuple[str, ...] = ()  # keys of its messages and their parts that nothing reads
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's descriptions of functions, for the template

    @property
    def labels(self) -> dict[str, str | float]:
        """The columns with short texts or numbers, by which reports tell problems apart."""
        short = {
            k: v
            for k, v in self.columns.items()
            if isinstance(v, str | int | float) and len(str(v)) <= MAX_LABEL
        }
        return dict(list(short.items())[:MAX_LABELS])
