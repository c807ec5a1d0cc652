"""The columns from which a problem is made, in our own rows and in those of other systems.

A format is an entry of `FORMATS`: names of columns, no code. In every format, prompts, images and
answers may have every shape that `rlinf_vl.data.rows` reads.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.errors import nearest

AUTO = "auto"
#: Names of the column of images; the first one that exists is used. `file_name` is the column of a
#: folder of images with a metadata file.
_IMAGES = ("images", "image", "file_names", "file_name")
#: Names of the column of videos, which any format may have.
_VIDEOS = ("videos", "video")


class Format(NamedTuple):
    """The column names of one system.

    The first of several names that exists is used; "" means that the column may be missing. A name
    with dots is a path into a mapping.
    """

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    images: tuple[str, ...] = (*_IMAGES, "")


#: data.format → its column names.
FORMATS = {
    # verl: examples/data_preprocess/*.py
    "verl": Format(("prompt",), ("reward_model.ground_truth",)),
    # SkyRL: docs, dataset-preparation; and other rows of chat messages in OpenAI's form
    "openai": Format(("prompt", "messages"), ("reward_spec.ground_truth", "answer", "")),
    # ours, which EasyR1 and RLinf use, too; images must exist unless data.image_keys is []
    "rlinf": Format(("problem",), ("answer",), _IMAGES),
    # OpenRLHF: data.input_key, data.label_key
    "openrlhf": Format(("prompt", "input"), ("label", "")),
    # TRL: docs, dataset_formats (prompt-only); the answer is a column that reward functions get
    "trl": Format(("prompt",), ("answer", "solution", "ground_truth", "")),
    # verifiers://NAME: images are in the environment's own prompts
    "verifiers": Format(("problem",), ("answer",), ("",)),
    # seeds://N: there is no reference answer
    "seeds": Format(("problem",), ("",), ("",)),
    # LLaVA, ShareGPT, VLM-R1, LLaMA-Factory: messages of from and value
    "sharegpt": Format(("conversations",), ("answer", "solution", "")),
    # a folder of images in subfolders named by label; data.prompt_variants are the question
    "folder": Format(("",), ("label",), ("file_name",)),
}
#: (format, columns by which it is recognised), in the order of trial.
RECOGNISED: tuple[tuple[str, set[str]], ...] = (
    ("verifiers", {"problem", "verifiers"}),
    ("verl", {"prompt", "reward_model"}),
    ("openai", {"prompt", "reward_spec"}),
    ("rlinf", {"problem", "answer"}),
    ("openai", {"prompt", "env_class"}),
    ("openrlhf", {"prompt", "label"}),
    ("openrlhf", {"input", "label"}),
    ("trl", {"prompt"}),
    ("openai", {"messages"}),
    ("sharegpt", {"conversations"}),
    ("seeds", {"problem", "seed"}),
    ("folder", {"file_name", "label"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """The rules by which a row becomes a problem; all fields but the last are those of `data.*`.

    The prompt is a string, or a list of chat messages whose content is a string or parts (`text`,
    `image`, `image_url`, `video`, `video_url`). `<image>` in a text is the placeholder of an image
    of `image_keys`, and `<video>` that of a video of `video_keys`. If the prompt has none of all
    these, the images come first, then the videos.
    """

    format: str = AUTO
    prompt_key: str = "problem"
    answer_key: str = "answer"
    messages_key: str | None = None  # set: rows are conversations to imitate
    image_keys: Sequence[str] = ("images",)
    video_keys: Sequence[str] | None = None  # None: those of `_VIDEOS`; no longer for columns
    video: VideoConfig = field(default_factory=VideoConfig)  # how videos are sampled
    image_root: str | None = (
        None  # image and video paths may not leave this folder; None: the dataset's
    )
    system_prompt: str | None = None  # replaces the row's system prompt and its images
    prompt_suffix: str = ""  # appended to the last message
    prompt_variants: Sequence[str] = ()  # texts with {problem} in place of the question
    max_images_per_message: int | None = None
    max_images_per_sample: int | None = None
    blank_images: bool = False  # whether each image is replaced by a grey one of its size
    image_hosts: Sequence[str] = ()  # hosts from which images and videos may be fetched
    #: Names of our environments; rows of other systems may use the same names.
    environments: Collection[str] = ()

    @classmethod
    def of(cls, data: Any, environments: Collection[str] = ()) -> Self:
        """Return the format of a config's `data` section."""
        keys = {
            field.name: getattr(data, field.name)
            for field in fields(cls)
            if field.name != "environments"
        }
        return cls(**keys, environments=environments)

    @property
    def columns(self) -> dict[str, str]:
        """Every column from which a problem is made → the config key that names it."""
        column_keys = {
            self.prompt_key: "data.prompt_key",
            self.answer_key.partition(".")[0]: "data.answer_key",
        }
        if self.messages_key is not None:
            column_keys[self.messages_key] = "data.messages_key"
        column_keys |= dict.fromkeys(self.image_keys, "data.image_keys")
        column_keys |= dict.fromkeys(self.video_keys or (), "data.video_keys")
        return {
            column: key
            for column, key in column_keys.items()
            if column or key == "data.prompt_key" and self.format != "folder"
        }

    def for_columns(self, columns: Iterable[str]) -> Self:
        """Return the format for a source with these columns.

        Keys with their default values get the column names of `format`. "auto" is recognised by the
        columns, and is "rlinf" if they match no format.
        """
        available, default = set(columns), RowFormat()
        if self.video_keys is None:
            return self._with_videos(available).for_columns(available)
        if self.messages_key is not None:
            return self._for_conversations(available)
        name = self.format
        if name == AUTO:
            name = next((name for name, columns in RECOGNISED if columns <= available), "rlinf")
        form = FORMATS.get(name, FORMATS["rlinf"])  # the config refuses unknown names

        def first(names: Sequence[str]) -> str:
            """Return the first name of an existing column; else the first name, for the error."""
            return next(
                (name for name in names if not name or name.partition(".")[0] in available),
                names[0],
            )

        column_keys = {}
        if self.prompt_key == default.prompt_key:
            column_keys["prompt_key"] = first(form.prompt)
        if self.answer_key == default.answer_key:
            column_keys["answer_key"] = first(form.answer)
        if tuple(self.image_keys) == default.image_keys:
            # Rows with videos need no images.
            image = first((*form.images, "") if self.video_keys else form.images)
            column_keys["image_keys"] = (image,) if image else ()
        return replace(self, format=name, **column_keys)

    def _with_videos(self, available: Collection[str]) -> Self:
        """Return the format with the first usual column of videos that exists and is not one of
        another key."""
        named = self.columns
        videos = [name for name in _VIDEOS if name in available and name not in named]
        return replace(self, video_keys=tuple(videos[:1]))

    def _for_conversations(self, available: Collection[str]) -> Self:
        """Return the format for a source of conversations: their column stands where the prompt's
        does, and they need neither a reference answer nor a column of images."""
        images = self.image_keys
        if tuple(images) == RowFormat().image_keys:
            images = next(((name,) for name in _IMAGES if name in available), ())
        messages_key = self.messages_key
        is_default = messages_key == "messages" and messages_key not in available
        if is_default and "conversations" in available:
            messages_key = "conversations"
        return replace(
            self,
            messages_key=messages_key,
            prompt_key=messages_key,
            answer_key=self.answer_key if self.answer_key in available else "",
            image_keys=images,
        )

    def missing_column(self, columns: Iterable[str], source: str) -> str | None:
        """Return an error message for the first column missing in `columns`, with similar names.

        None if all columns exist.
        """
        available = sorted(columns)
        for column, key in self.columns.items():
            if column not in available:
                message = f"{key}: column {column!r} not in {source}; columns are {', '.join(available) or 'none'}"
                return f"{message};{nearest(column, available)}".rstrip(";")
        if not self.prompt_key and not self.prompt_variants:
            example = "data.prompt_variants=['What is this?']"
            return f"data.prompt_variants: {source} has pictures and labels, but no question; write one, as in {example}"
        for variant in self.prompt_variants if self.prompt_key else ():
            if "{problem}" not in variant:
                reason = f"the question of {source} is not asked; write it where that stands"
                return f"data.prompt_variants: {variant!r} has no {{problem}}, so that {reason}"
        return None
