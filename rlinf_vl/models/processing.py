"""Tokenizer and image preprocessing of a checkpoint: pixels, grids, special ids and decoding.

A clip, the sampled frames of a video, is an image like a picture. Tokenizer and image processor are
loaded separately (transformers' combined processor needs
torchvision for video). Engine and trainer use this one class with one setting of pixel limits, so
both see the same pixels and counts.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from rlinf_vl.data.clips import frame_refs, is_clip, timestamps_of
from rlinf_vl.data.images import decode, image_size
from rlinf_vl.models.byte_cache import ByteCache, text_bytes
from rlinf_vl.models.family import Family
from rlinf_vl.models.image_processor import ImageProcessor
from rlinf_vl.models.image_tokens import ImageTokens, with_videos
from rlinf_vl.models.video_processor import VideoProcessor
from rlinf_vl.types import Grid, ImageRef

#: Bytes of decoded answers in the cache: an answer is decoded for its environment, for its reward
#: and for samples on display.
TEXT_BYTES = 2**24
#: Images whose grids and ids are in the cache: every turn of an episode needs those of all images so
#: far.
MAX_IMAGES = 16384


class Processor:
    """The tokenizer and the image processor of a checkpoint.

    It turns images into grids and patches and ids into text, and lists the ids that end a response
    and those that may not be sampled.
    """

    def __init__(
        self,
        path: str | Path,
        family: Family,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        video_min_pixels: int | None = None,
        video_max_pixels: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load tokenizer and image processor of a checkpoint.

        `min_pixels` and `max_pixels` bound an image's area after resizing; None means the
        checkpoint's own bound. `video_min_pixels` and `video_max_pixels` bound the area of a clip's
        frame further than the checkpoint does.
        """
        self.family = family
        self._path = path
        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        #: Ids that end a response, the end of a turn first.
        self.stop_ids = family.stop_ids(self.tokenizer, str(path), trust_remote_code)
        self.image_tokens = ImageTokens(-1)
        #: Special tokens that `decode` shows, by id.
        self._visible: dict[int, str] = {}
        self._decoded = ByteCache(self._decode, size=text_bytes, max_bytes=TEXT_BYTES)
        #: By hash: the grid, and the ids in a prompt.
        self._images: dict[str, tuple[Grid, list[np.ndarray]]] = {}
        self._image_processor: ImageProcessor | None = None
        self._videos: VideoProcessor | None = None
        #: The text of a clip's placeholder; "" where the model reads no videos.
        self.video_token = ""
        if not family.vision_tower:
            return
        self._image_processor = family.image_processor(path, min_pixels, max_pixels)
        image_token_id = self.tokenizer.convert_tokens_to_ids(family.image_token)
        if image_token_id in (None, self.tokenizer.unk_token_id):
            raise ValueError(
                f"the tokenizer in {path} has no {family.image_token!r}, which {family.model_type} "
                "needs"
            )
        self.image_tokens = self._image_processor.image_tokens(image_token_id)
        if family.videos is None:
            return
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        video_token = self._token(config, "video")
        if video_token not in family.special_tokens:
            return
        self._videos = family.videos(path, video_min_pixels, video_max_pixels)
        self.image_tokens = with_videos(self.image_tokens, config, self._videos.timestamped)
        self.video_token = video_token
        self._vision_start, self._vision_end = (
            self._token(config, f"vision_{edge}") for edge in ("start", "end")
        )

    def _token(self, config: Any, name: str) -> str:
        """Return the text of the token that a config names, "" where there is none."""
        token_id = getattr(config, f"{name}_token_id", None)
        return "" if token_id is None else self.tokenizer.convert_ids_to_tokens(token_id) or ""

    @property
    def image_token_id(self) -> int:
        """The id of a picture's placeholder; -1, which no token has, without a vision tower."""
        return self.image_tokens.id

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The ids of placeholders, of pictures and of clips."""
        return self.image_tokens.placeholder_ids

    @property
    def image_processor(self) -> ImageProcessor:
        """The checkpoint's image processor.

        Raises:
            ValueError: the family reads no images.
        """
        if self._image_processor is None:
            raise ValueError(
                f"images for a model of type {self.family.model_type}, which has no vision tower; "
                "take them out of the prompts, or set rollout.model.model_path to a "
                "vision-language model"
            )
        return self._image_processor

    @property
    def videos(self) -> VideoProcessor:
        """The checkpoint's video processor.

        Raises:
            ValueError: the model reads no videos.
        """
        if self._videos is None:
            reason = "whose videos are not supported"
            if self.family.videos is not None:
                reason = f"but the tokenizer in {self._path} has no placeholder for one"
            raise ValueError(
                f"a video for a model of type {self.family.model_type}, {reason}; give its frames "
                "as images, or set rollout.model.model_path to a model that reads videos"
            )
        return self._videos

    @property
    def pad_id(self) -> int:
        """The id that fills padded rows; any id does, as its positions carry no loss."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.tokenizer.eos_token_id

    def banned_ids(self, vocab_size: int) -> np.ndarray:
        """Return bool [vocab_size], True where an id may never be sampled.

        Banned are vision and padding ids, and ids without a token. The trainer's log-softmax leaves
        the same ids out.
        """
        vocabulary = self.tokenizer.get_vocab()
        never = {self.tokenizer.pad_token_id, *map(vocabulary.get, self.family.special_tokens)}
        never |= set(self.image_tokens.marks)
        allowed = set(vocabulary.values()) - never | set(self.stop_ids)
        banned = np.ones(vocab_size, bool)
        banned[[i for i in allowed if i < vocab_size]] = False
        return banned

    def grid(self, image: ImageRef) -> Grid:
        """Return (t, h, w) in patches of an image after resizing; reads only its header."""
        return self._grid_and_ids(image)[0]

    def image_ids(self, image: ImageRef) -> list[np.ndarray]:
        """Return the ids int32 [n] for each placeholder of an image in a rendered prompt.

        A picture has one placeholder there, a clip those of `video_text`. Only headers are read.
        """
        return self._grid_and_ids(image)[1]

    def video_text(self, clip: ImageRef) -> str:
        """Return the text that stands for a clip in a prompt, in place of `video_token`."""
        return self.videos.text(
            timestamps_of(clip), self._vision_start, self.video_token, self._vision_end
        )

    def _grid_and_ids(self, image: ImageRef) -> tuple[Grid, list[np.ndarray]]:
        facts = self._images.get(image.hash)
        if facts is None:
            # Dropping all is rare, and costs one reading of each header.
            if len(self._images) >= MAX_IMAGES:
                self._images.clear()
            read = self._clip_facts if is_clip(image) else self._picture_facts
            facts = self._images[image.hash] = read(image)
        return facts

    def _picture_facts(self, image: ImageRef) -> tuple[Grid, list[np.ndarray]]:
        processor, size = self.image_processor, image_size(image)
        return processor.grid(*size), [processor.ids(*size, self.image_token_id)]

    def _clip_facts(self, image: ImageRef) -> tuple[Grid, list[np.ndarray]]:
        grid = self.videos.grid(len(timestamps_of(image)), *image_size(image))
        return grid, self.image_tokens.clip_ids(grid)

    def pixels(self, image: ImageRef) -> np.ndarray:
        """Return `ImageProcessor.patches` of an encoded picture, or those of a clip.

        Raises:
            ImageError: it can't be decoded.
        """
        if is_clip(image):
            return self.videos.patches(list(map(decode, frame_refs(image))))
        return self.image_processor.patches(decode(image))

    def show_special(self, texts: Sequence[str]) -> None:
        """Let `decode` show the special tokens that these texts are or begin with.

        Call it before anything is decoded.
        """
        for token_id, token in self.tokenizer.added_tokens_decoder.items():
            if token.special and any(text.startswith(token.content) for text in texts):
                self._visible[token_id] = token.content

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of response ids, special tokens but those of `show_special` left out."""
        return self._decoded(ids.astype(np.int32, copy=False).tobytes())

    def _decode(self, ids_bytes: bytes) -> str:
        ids = np.frombuffer(ids_bytes, np.int32)
        texts: list[str] = []
        start = 0
        for mark in np.flatnonzero(np.isin(ids, list(self._visible))).tolist():
            texts += [self._plain_text(ids[start:mark]), self._visible[int(ids[mark])]]
            start = mark + 1
        return "".join([*texts, self._plain_text(ids[start:])])

    def _plain_text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)


class PixelCache(ByteCache[ImageRef, np.ndarray]):
    """The most recently used images' pixels, by content hash.

    It is called like `Processor.pixels`, from any thread.
    """

    def __init__(self, pixels: Callable[[ImageRef], np.ndarray], max_bytes: int = 2**29) -> None:
        super().__init__(
            pixels,
            key=attrgetter("hash"),
            size=lambda image, patches: patches.nbytes,
            max_bytes=max_bytes,
        )
