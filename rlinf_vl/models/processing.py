"""Text and pixels on their way into the model: chat template, placeholder expansion, image preprocessing.

Invariant: control tokens and image placeholders in a prompt come from the chat template alone. What looks like one in a
message's text is encoded as the text that it is.

Tokenizer and image processor are loaded apart (transformers' combined processor wants torchvision for video), and the
engine and the trainer use this one class with one setting of pixel limits, so both see the same pixels and counts.
"""

import copy
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from rlinf_vl.data.images import decode, image_size
from rlinf_vl.models.families import Family
from rlinf_vl.types import ImageRef, Message

#: Keys of a message's parts that hold no text for the model.
_NO_TEXT = ("type", "image", "image_url")


class Processor:
    """Prompts → ids and grids; images → pixel patches; the ids that may not and that end a response."""

    def __init__(
        self,
        path: str | Path,
        family: Family,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`min_pixels`/`max_pixels` bound an image's area after resizing; None keeps the checkpoint's own bounds."""
        self.family = family
        self.path, self.trust_remote_code = str(path), trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        self.image_processor = family.image_processor(path, min_pixels, max_pixels)
        self.image_token_id = self._id_of(family.image_token)

    def _id_of(self, token: str) -> int:
        index = self.tokenizer.convert_tokens_to_ids(token)
        if index is None or index == self.tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer in {self.path} has no {token!r}, which {self.family.model_type} needs")
        return index

    @property
    def pad_id(self) -> int:
        """Filler of padded rows; any id does, its positions carry no loss."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.tokenizer.eos_token_id

    @property
    def merge_size(self) -> int:
        return self.image_processor.merge_size

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response, the end of a turn first."""
        return self.family.stop_ids(self.tokenizer, self.path, self.trust_remote_code)

    def banned_ids(self, vocab_size: int) -> np.ndarray:
        """bool [vocab_size], True where an id may never be sampled: vision and padding ids, and ids without a token.

        The trainer's log-softmax leaves the same ids out.
        """
        banned = np.zeros(vocab_size, bool)
        known = self.tokenizer.get_vocab()
        banned[[known[t] for t in self.family.special_tokens if t in known]] = True
        used = np.zeros(vocab_size, bool)
        used[[i for i in known.values() if i < vocab_size]] = True
        banned |= ~used
        if self.tokenizer.pad_token_id is not None:
            banned[self.tokenizer.pad_token_id] = True
        banned[list(self.stop_ids)] = False
        return banned

    def grid(self, image: ImageRef) -> tuple[int, int, int]:
        """(t, h, w) in patches of an image after resizing, from its header alone."""
        return self.image_processor.grid(*image_size(image))

    def image_tokens(self, grids: np.ndarray) -> np.ndarray:
        """int [n]: placeholder ids that each image of `grids` [n, 3] takes."""
        return grids.prod(axis=1) // self.merge_size**2

    def prompt(self, messages: Sequence[Message], images: Sequence[ImageRef]) -> tuple[np.ndarray, np.ndarray]:
        """Render messages, and expand each image's placeholder to as many ids as the image has tokens.

        Returns:
            (ids int32 [P], grids int32 [len(images), 3]).

        Raises:
            ValueError: the rendered prompt does not hold one placeholder per image.
        """
        ids = np.asarray(self._encode(messages), np.int32)
        grids = np.asarray([self.grid(image) for image in images], np.int32).reshape(len(images), 3)
        is_image = ids == self.image_token_id
        if int(is_image.sum()) != len(images):
            raise ValueError(
                f"the rendered prompt holds {int(is_image.sum())} {self.family.image_token} for {len(images)} images: the "
                "messages do not show each image once, or the chat template does not render them"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[is_image] = self.image_tokens(grids)
        return np.repeat(ids, repeats), grids

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the rendered messages, the special tokens in their own texts as text.

        Where a text has one, a mark behind its first character keeps it apart from those of the template, whatever the
        template does with the text; what stands between the template's tokens is encoded by itself, as it always is.
        """
        marked, mark = self._mark(messages)
        rendered = self.tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
        if not mark:
            return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"({self._special})", rendered)):
            if i % 2:
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                text = piece.replace(mark, "")
                ids += self._text_only(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _mark(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """The messages with a mark in each special token of a text, and the mark: empty if there is no such token."""
        texts = [text for message in messages for text in _texts(message)]
        joined = "".join(texts)  # a template may put two parts side by side
        places = [match.start() for match in re.finditer(f"(?={self._special})", joined)]
        if not places:
            return list(messages), ""
        mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in joined)
        bounds = np.cumsum([0, *map(len, texts)])
        marked = []
        for text, start, end in zip(texts, bounds, bounds[1:], strict=False):
            for place in reversed([p - start for p in places if start <= p < end]):
                text = text[: place + 1] + mark + text[place + 1 :]
            marked.append(text)
        rest = iter(marked)
        return [_with_texts(message, rest) for message in messages], mark

    @cached_property
    def _special(self) -> str:
        """A regular expression for any special token."""
        known = self.tokenizer.added_tokens_decoder.values()
        tokens = {token.content for token in known if token.special} | set(self.tokenizer.all_special_tokens)
        return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))

    @cached_property
    def _text_only(self) -> Any:
        """A tokenizer of its own for texts with special tokens: the setting is the object's, and threads share the other."""
        return copy.deepcopy(self.tokenizer)

    def pixels(self, image: ImageRef) -> np.ndarray:
        """float32 [t·h·w, channels · temporal patch · patch²]: one image, decoded, resized, normalised and patched.

        Raises:
            ImageError: the bytes can't be decoded.
        """
        return self.image_processor.patches(decode(image))

    def decode(self, ids: np.ndarray) -> str:
        """Text of response ids, special tokens left out."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def _texts(value: Any) -> Iterator[str]:
    """Every text of a message, its images' addresses aside, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _NO_TEXT:
                yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _with_texts(value: Any, texts: Iterator[str]) -> Any:
    """The message with other texts in the order of `_texts`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {key: item if key in _NO_TEXT else _with_texts(item, texts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_texts(item, texts) for item in value]
    return value


class PixelCache:
    """The most recently used images' pixels, by content hash, within a bound of bytes. Callable like `Processor.pixels`, from
    any thread; threads that miss one image at the same time each compute it, and one result is kept."""

    def __init__(self, pixels: Callable[[ImageRef], np.ndarray], max_bytes: int = 2**29) -> None:
        self._pixels, self._max_bytes = pixels, max_bytes
        self._held: OrderedDict[str, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, image: ImageRef) -> np.ndarray:
        with self._lock:
            if image.hash in self._held:
                self._held.move_to_end(image.hash)
                return self._held[image.hash]
        made = self._pixels(image)
        with self._lock:
            patches = self._held.setdefault(image.hash, made)
            if patches is made:
                self._bytes += patches.nbytes
            while self._bytes > self._max_bytes and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        return patches
