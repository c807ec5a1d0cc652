"""Inspection of rows in parallel: the verdict of training on each, and facts about it.

Only hashes and numbers leave a worker process.
"""

import hashlib
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlinf_vl.config import Config
from rlinf_vl.data.clips import is_clip, timestamps_of
from rlinf_vl.data.dataset import FilterResult, open_datasets
from rlinf_vl.data.images import image_size
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.errors import RunError
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.types import ImageRef, Problem

if TYPE_CHECKING:
    from rlinf_vl.models.image_processor import ImageProcessor

#: Rows of a chunk, after each of which progress is reported; chunks that justify a further process,
#: which first loads the data and the tokenizer.
CHUNK, CHUNKS_PER_PROCESS = 64, 8

#: Values of data.image_max_pixels that the report compares.
PIXEL_BUDGETS = tuple(side * side for side in (256, 384, 512, 768, 1024, 1536))


class ImageFacts(NamedTuple):
    """The facts of an image or a video in a row."""

    hash: str  # of the encoded bytes
    height: int
    width: int
    bytes: int
    #: At data.image_max_pixels and each of `PIXEL_BUDGETS`, -1 where a budget is below
    #: data.image_min_pixels; () without a model.
    tokens: tuple[int, ...]
    frames: int = 0  # sampled frames of a video; 0 for an image
    seconds: float = 0.0  # time of a video's last frame


class RowFacts(NamedTuple):
    """The facts of a row that is a problem, usable or not."""

    row: int
    text: str  # hash of the texts, spaces and case aside, with the places of images
    answer: str
    tokens: int  # of the whole prompt; 0 without a model
    images: tuple[ImageFacts, ...]  # videos included, in the order of the prompt

    @property
    def n_images(self) -> int:
        """The number of its images, videos not included."""
        return sum(not image.frames for image in self.images)


#: (split, rows) → the verdict of training on the rows, and the facts of those that are problems.
Inspect = Callable[[str, Sequence[int]], tuple[FilterResult, list[RowFacts]]]


def make_inspect(config: Config, model_path: str | None) -> Inspect:
    """Load the data, and tokenizer and image processor of the model; without one, tokens are not
    counted."""
    from rlinf_vl.extras.sft.demonstrations import Demonstrations
    from rlinf_vl.rollout.episode.env_makers import env_maker_of
    from rlinf_vl.rollout.episode.row_check import (
        RowCheck,
        processor_of,
        request_builder_of,
    )

    data = config.data
    builder = None
    processors: list[ImageProcessor | None] = []
    image_tokens = ImageTokens(-1)
    if model_path is not None:
        processor = processor_of(config, model_path)
        image_tokens = processor.image_tokens
        builder = request_builder_of(config, processor)
        if processor.family.vision_tower:
            make = partial(processor.family.image_processor, model_path, data.image_min_pixels)
            # the config's own first, then one for each budget, as in `ImageFacts.tokens`
            processors = [
                processor.image_processor,
                *map(partial(_unless_refused, make), PIXEL_BUDGETS),
            ]

    @cache
    def tokens_of(height: int, width: int) -> tuple[int, ...]:
        return tuple(
            image_tokens(np.array([p.grid(height, width)])).item() if p else -1 for p in processors
        )

    def clip_tokens(clip: ImageRef) -> tuple[int, ...]:
        if builder is None:
            return ()
        n_tokens = image_tokens(np.array([builder.renderer.processor.grid(clip)])).item()
        # Limits of an image's area do not concern videos.
        return (n_tokens,) * len(processors)

    # Conversations to imitate have answers of their own, and no environment.
    demonstrations = None
    if data.messages_key is not None and model_path is not None:
        demonstrations = Demonstrations(config, model_path)
    check = RowCheck(config, builder, env_maker_of(config))
    datasets = open_datasets(data, ENVIRONMENTS)

    def inspect(split: str, rows: Sequence[int]) -> tuple[FilterResult, list[RowFacts]]:
        facts_by_row: dict[int, RowFacts] = {}

        def add_facts(row: int, problem: Problem, tokens: int) -> None:
            images = []
            for image in problem.images:
                height, width = image_size(image)
                facts = image.hash[:24], height, width, len(image.data)
                if is_clip(image):
                    times = timestamps_of(image)
                    images.append(ImageFacts(*facts, clip_tokens(image), len(times), times[-1]))
                else:
                    images.append(ImageFacts(*facts, tokens_of(height, width)))
            # a row may have several wordings; the longest one must fit
            if row not in facts_by_row or facts_by_row[row].tokens < tokens:
                facts_by_row[row] = RowFacts(
                    row, _text_hash(problem), problem.answer.strip(), tokens, tuple(images)
                )

        if demonstrations is not None:
            result = demonstrations.check(split, rows, add_facts)
        else:
            split_check = replace(check, for_training=split == "train")
            result = split_check.filter(datasets[split], rows, add_facts)
        return result, list(facts_by_row.values())

    return inspect


def _unless_refused(
    make: "Callable[[int], ImageProcessor]", max_pixels: int
) -> "ImageProcessor | None":
    """Return the image processor at this budget; None if it is below the smallest area."""
    try:
        return make(max_pixels)
    except ValueError:  # below data.image_min_pixels
        return None


def _text_hash(problem: Problem) -> str:
    """Return a hash of a problem's texts, system prompt, spaces and case aside."""
    # the system prompt is the config's and the same for all; images are empty parts
    parts = [
        part
        for message in problem.messages
        if message["role"] != "system"
        for part in message["content"]
    ]
    text = "\0".join(" ".join(part.get("text", "").casefold().split()) for part in parts)
    # a text of a data set may have lone surrogates, which UTF-8 refuses
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def inspect_rows(
    config: Config,
    model_path: str | None,
    rows: Mapping[str, int],
    workers: int,
    progress: Callable[[int], None],
) -> dict[str, tuple[FilterResult, list[RowFacts]]]:
    """Inspect the first rows of each split, in `workers` processes if there are enough rows for
    that.

    Args:
        rows: split → number of rows.
        progress: called with the number of rows done since its last call.

    Raises:
        RunError: a process died.
    """
    # Small ones, so that no process still works on a large one when the others are done.
    chunks = []
    for split, n in rows.items():
        chunks += [(split, range(start, min(start + CHUNK, n))) for start in range(0, n, CHUNK)]
    results: dict[str, list[FilterResult]] = {split: [] for split in rows}
    facts: dict[str, list[RowFacts]] = {split: [] for split in rows}
    with _chunk_inspector(
        config, model_path, min(workers, -(-len(chunks) // CHUNKS_PER_PROCESS))
    ) as run:
        for split, (result, chunk_facts) in run(chunks):
            results[split].append(result)
            facts[split] += chunk_facts
            progress(sum(map(len, (result.kept, result.too_long, result.bad, result.text_only))))
    # chunks are done in any order; facts begin with their row's number
    return {split: (FilterResult.merged(results[split]), sorted(facts[split])) for split in rows}


#: Chunks → the split and the facts of each, as it is done.
_Run = Callable[
    [Sequence[tuple[str, range]]], Iterator[tuple[str, tuple[FilterResult, list[RowFacts]]]]
]


@contextmanager
def _chunk_inspector(config: Config, model_path: str | None, workers: int) -> Iterator[_Run]:
    """Yield a function that inspects chunks and yields them as they are done."""
    if workers <= 1:
        inspect = make_inspect(config, model_path)
        yield lambda chunks: ((split, inspect(split, rows)) for split, rows in chunks)
        return
    # spawned: a forked process would inherit the locks of the parent's threads
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin_process, (config, model_path))
    try:

        def run(
            chunks: Sequence[tuple[str, range]],
        ) -> Iterator[tuple[str, tuple[FilterResult, list[RowFacts]]]]:
            split_of_future = {
                pool.submit(_inspect_in_process, split, rows): split for split, rows in chunks
            }
            for future in as_completed(split_of_future):
                yield split_of_future.pop(future), future.result()

        yield run
    except BrokenProcessPool as error:
        raise RunError(
            "a process that looked at rows died, perhaps for want of memory; name fewer of them "
            "with --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


#: The arguments of `make_inspect` in a worker process; empty in the parent.
_process_arguments: list[tuple[Config, str | None]] = []


def _begin_process(config: Config, model_path: str | None) -> None:
    """Set up a new process.

    It loads the data at its first chunk, not here: an error there is the chunk's, an error here
    breaks the pool.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The parent has opened the data, too, and warned.
    logging.getLogger("rlinf_vl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    _process_arguments.append((config, model_path))


@cache
def _inspect_of_process() -> Inspect:
    config, model_path = _process_arguments[0]
    return make_inspect(config, model_path)


def _inspect_in_process(split: str, rows: range) -> tuple[FilterResult, list[RowFacts]]:
    return _inspect_of_process()(split, rows)
