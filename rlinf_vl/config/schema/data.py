"""Keys of `data`: rows, prompts, images."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from rlinf_vl.config.schema.limits import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    OFF_OR_POSITIVE,
    POSITIVE,
    SHARE,
    key,
)


@dataclass
class VideoConfig:
    """How videos are sampled, once, before engine and trainer get the same frames (docs/video.md)."""

    fps: float = key(2.0, POSITIVE)
    """Frames sampled of each second of a video. A video given as a list of frames has so many a
    second, unless it names its own `fps`."""
    max_frames: int = key(32, AT_LEAST_1)
    """Most frames of a video; of a longer one, so many are sampled evenly from its start to its
    end."""
    min_pixels: int | None = key(None, AT_LEAST_1)
    """Smallest area of a frame; smaller ones are enlarged. null leaves them, so that the
    checkpoint's own bound holds."""
    max_pixels: int | None = key(200_704, AT_LEAST_1)
    """Largest area of a frame; larger ones are scaled down where the video is read, and kept so.
    null keeps up to a million pixels, so that the checkpoint's own bound holds."""


@dataclass
class DataConfig:
    train_data_paths: list[str] = MISSING
    """Files (parquet, json, jsonl, csv, tsv), HF dataset folders, folders of images, or hub names
    (hf://owner/name[:split]); or an embedded task (`toy`). `seeds://N` is N rows of nothing but a
    number, for an environment that makes its tasks from seeds, and `verifiers://NAME` the rows of
    an environment of verifiers (docs/hubs.md)."""
    val_data_paths: list[str] = field(default_factory=list)
    """The same, for validation."""
    weights: list[float] = key([], POSITIVE)
    """Shares of the training sources in every batch, one for each of train_data_paths and
    independent of their sizes; they need not sum to 1. []: all rows once an epoch."""
    format: str = key(
        "auto", ("auto", "rlinf", "verl", "openai", "trl", "openrlhf", "sharegpt", "folder")
    )
    """Layout of the columns of rows: rlinf (problem, answer, images; EasyR1's, too), verl, openai
    (SkyRL's, too), trl, openrlhf, sharegpt (LLaVA's, VLM-R1's), folder (pictures in folders named after what they show). auto
    recognises them by the columns. It names what prompt_key, answer_key and image_keys leave at
    their defaults."""
    prompt_key: str = "problem"
    """Column of the question: a text, `<image>` and `<video>` in it mark where an image or a video
    stands, or chat messages, which may hold both."""
    answer_key: str = "answer"
    """Column of the reference answer, with or without \\boxed{}; a name with dots leads into a
    mapping (reward_model.ground_truth). The column of the prompt: the last answer of its messages
    is the reference, and no part of the prompt."""
    messages_key: str | None = None
    """Column of whole conversations, whose answers `rlinf-vl sft` imitates (there, null is
    messages, or conversations): chat messages, the last one the assistant's; those with `weight: 0`
    are not imitated. `train` needs it null."""
    imitate: list[str] = key(["content", "thoughts", "calls"], ("content", "thoughts", "calls"))
    """Parts of an imitated answer that carry loss in `rlinf-vl sft`: its text, its thoughts with
    their marks, its calls of tools. Results of tools never do."""
    image_keys: list[str] = field(default_factory=lambda: ["images"])
    """Columns that hold images, in order; [] for text only, or for images in chat messages."""
    video_keys: list[str] | None = None
    """Columns that hold videos, in order: files (bytes, paths, URLs) or lists of frames. null:
    videos or video, where there is one; [] reads none."""
    video: VideoConfig = field(default_factory=VideoConfig)
    image_root: str | None = None
    """Folder that image and video paths are relative to and may not leave; null: the data set's own."""
    max_images_per_message: int | None = key(None, AT_LEAST_1)
    """Images shown of each message, the first so many; the others are left out, and counted
    (data/dropped_images). Videos are not counted, and stay. null: all."""
    max_images_per_sample: int | None = key(None, AT_LEAST_1)
    """Images shown of each prompt, all messages together; as max_images_per_message."""
    image_only_mode: bool = False
    """Leave out rows without an image or a video; they are counted (data/text_only_rows)."""
    system_prompt: str | None = None
    """System message put before every problem."""
    prompt_suffix: str = ""
    """Text appended to every question, such as the answer format asked for."""
    prompt_variants: list[str] = field(default_factory=list)
    """Texts around the question, with {problem} where it stands. Training draws one for each group
    of answers, from runner.seed, the step and the row; validation always shows the first."""
    max_prompt_length: int = key(1024, AT_LEAST_1)
    """Longest prompt in tokens, image placeholders expanded. In `sft`, runner.seq_length bounds
    whole conversations instead."""
    overlong: str = key("drop", ("drop", "cut", "error"))
    """Longer prompts. drop: the row is left out. cut: the prompt is cut from its beginning to what
    fits, images and earlier messages whole; system messages and the end of the last message stay.
    error: the run stops before training. And an observation that leaves no room in
    runner.seq_length. drop: the episode ends before it. cut: it is cut alike, to leave room for a
    whole answer. error: the trajectory is one of a bad row."""
    filter_prompt_by_length: bool = True
    """With overlong: drop, leave rows with longer prompts out before training; false counts them as
    bad (max_bad_rows)."""
    rollout_batch_size: int = key(32, AT_LEAST_1)
    """Problems per training step."""
    val_samples: int = key(-1, OFF_OR_POSITIVE)
    """Validation rows used (the first so many); -1 uses all."""
    val_group_by: str | None = None
    """Column with short texts or numbers whose values are the sets: val/SET/accuracy, its mean over
    the sets (val/accuracy_by_set), train/SET/reward and train/SET/accuracy. null: data_source, if
    rows have several."""
    sample_val: bool = False
    """In `sft`, also sample an answer to each validation row, by prompt_key, and grade it with the
    reward against answer_key (val/accuracy); false computes val/loss alone."""
    shuffle: bool = True
    """Shuffle the training rows anew every epoch."""
    seed: int | None = key(None, NOT_NEGATIVE)
    """Seeds the order; null: runner.seed."""
    curriculum_key: str | None = None
    """Column of numbers, such as a difficulty: every epoch goes from small to large ones, equal
    ones shuffled (data.shuffle). A name with dots leads into a mapping."""
    image_min_pixels: int | None = key(None, AT_LEAST_1)
    """Smallest image area after resizing; null is the checkpoint's own. One setting for engine and
    trainer."""
    image_max_pixels: int | None = key(None, AT_LEAST_1)
    """Largest image area after resizing; null is the checkpoint's own."""
    blank_images: bool = False
    """Diagnostic: replace every image, and every frame of a video, by a blank one of its size. What
    is still learned is not seen."""
    vision_controls: list[str] = key([], ("blank", "swapped", "cropped"))
    """Ask each validation question again: blank: without its image's content; swapped: with another
    question's image; cropped: with half of it hidden. val/accuracy_<control>, and with blank the
    split of the gain into seen and guessed (docs/did-it-look.md)."""
    image_hosts: list[str] = field(default_factory=list)
    """Hosts that images and videos given as http(s) URLs are fetched from, redirects included, by name without
    port; each is kept in the cache folder (RLINF_VL_CACHE) from then on. [] fetches nothing: such a
    row is bad."""
    max_bad_rows: float = key(0.05, SHARE)
    """Share of a split's rows, 0 to 1, that may be unusable (each is listed with its reason in
    bad_rows.jsonl of the run folder); beyond it the run stops and says why. 0 stops at the first, 1
    never."""
