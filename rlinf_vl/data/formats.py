"""Which columns a problem is made from: in rows of our own form, and in those that other systems write.

A format is a row of `FORMATS`: names of columns, no code. Whatever the names, prompts, images and answers may have every shape
that `rlinf_vl.data.rows` reads.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

from rlinf_vl.errors import nearest

AUTO = "auto"
#: Columns of images, the first that is there; `file_name` is that of a folder of images with a metadata file.
_IMAGES = ("images", "image", "file_names", "file_name")


class Format(NamedTuple):
    """How one system names its columns. Of several names the first that is there counts; "" says that there may be none.

    A name with dots leads into a mapping.
    """

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    images: tuple[str, ...] = (*_IMAGES, "")


#: data.format → names.
FORMATS = {
    # verl: examples/data_preprocess/*.py
    "verl": Format(("prompt",), ("reward_model.ground_truth",)),
    # SkyRL: docs, dataset-preparation; and other rows of chat messages in OpenAI's form
    "openai": Format(("prompt", "messages"), ("reward_spec.ground_truth", "answer", "")),
    # ours, as EasyR1's and RLinf's; images must be there or data.image_keys say []
    "rlinf": Format(("problem",), ("answer",), _IMAGES),
    # OpenRLHF: data.input_key, data.label_key
    "openrlhf": Format(("prompt", "input"), ("label", "")),
    # TRL: docs, dataset_formats (prompt-only); the answer is one of the columns that reward functions get
    "trl": Format(("prompt",), ("answer", "solution", "ground_truth", "")),
    # seeds://N: there is no answer that anything could be graded against
    "seeds": Format(("problem",), ("",), ("",)),
    # a folder of images whose subfolders are named after what they show; data.prompt_variants ask
    "folder": Format(("",), ("label",), ("file_name",)),
}
#: What columns tell a format by, in the order in which this is tried.
RECOGNISED = (
    ("verl", {"prompt", "reward_model"}),
    ("openai", {"prompt", "reward_spec"}),
    ("rlinf", {"problem", "answer"}),
    ("openai", {"prompt", "env_class"}),
    ("openrlhf", {"prompt", "label"}),
    ("openrlhf", {"input", "label"}),
    ("trl", {"prompt"}),
    ("openai", {"messages"}),
    ("seeds", {"problem", "seed"}),
    ("folder", {"file_name", "label"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How a row becomes a problem; the fields but the last are those of `data.*`.

    The prompt is a string or a list of chat messages whose content is a string or parts (`text`, `image`, `image_url`); `<image>`
    in a text marks where an image of `image_keys` stands. Without any image in the prompt all images stand first.
    """

    format: str = AUTO
    prompt_key: str = "problem"
    answer_key: str = "answer"
    image_keys: Sequence[str] = ("images",)
    image_root: str | None = None  # the folder that paths start in and may not leave; None: the dataset's own
    system_prompt: str | None = None  # replaces the row's own, and the images shown there
    prompt_suffix: str = ""  # appended to the last message
    prompt_variants: Sequence[str] = ()  # texts around the question, {problem} in each
    max_images_per_message: int | None = None
    max_images_per_sample: int | None = None
    blank_images: bool = False  # replace each image by a grey one of its size
    image_hosts: Sequence[str] = ()  # which images may be fetched from
    environments: Collection[str] = ()  # names that rows of other systems may have in common with ours

    @classmethod
    def of(cls, data: Any, environments: Collection[str] = ()) -> Self:
        """The format that a config's `data` section says."""
        keys = {field.name: getattr(data, field.name) for field in fields(cls) if field.name != "environments"}
        return cls(**keys, environments=environments)

    @property
    def columns(self) -> dict[str, str]:
        """Every column that a problem is made from → the config key that names it."""
        named = {self.prompt_key: "data.prompt_key", self.answer_key.partition(".")[0]: "data.answer_key"}
        named |= dict.fromkeys(self.image_keys, "data.image_keys")
        return {
            column: key
            for column, key in named.items()
            if column or key == "data.prompt_key" and self.format != "folder"
        }

    def for_columns(self, columns: Iterable[str]) -> Self:
        """The same for a source with these columns: keys that have their defaults name the columns of `format`, which is
        recognised by the columns where it is auto. Not found, they stay as they are."""
        there, default = set(columns), RowFormat()
        name = self.format
        if name == AUTO:
            name = next((name for name, columns in RECOGNISED if columns <= there), "rlinf")
        form = FORMATS.get(name, FORMATS["rlinf"])  # another name is refused with the config

        def first(names: Sequence[str]) -> str:
            return next((name for name in names if not name or name.partition(".")[0] in there), names[0])

        own = {}
        if self.prompt_key == default.prompt_key:
            own["prompt_key"] = first(form.prompt)
        if self.answer_key == default.answer_key:
            own["answer_key"] = first(form.answer)
        if tuple(self.image_keys) == default.image_keys:
            image = first(form.images)
            own["image_keys"] = (image,) if image else ()
        return replace(self, format=name, **own)

    def missing_column(self, columns: Iterable[str], source: str) -> str | None:
        """What to say of the first column that `columns` lacks, with what is near; None if all are there."""
        there = sorted(columns)
        for column, key in self.columns.items():
            if column not in there:
                said = f"{key}: column {column!r} not in {source}; columns are {', '.join(there) or 'none'}"
                return f"{said};{nearest(column, there)}".rstrip(";")
        if not self.prompt_key and not self.prompt_variants:
            example = "data.prompt_variants=['What is this?']"
            return (
                f"data.prompt_variants: {source} has pictures and labels, but no question; write one, as in {example}"
            )
        for variant in self.prompt_variants if self.prompt_key else ():
            if "{problem}" not in variant:
                asked = f"the question of {source} is not asked; write it where that stands"
                return f"data.prompt_variants: {variant!r} has no {{problem}}, so that {asked}"
        return None
