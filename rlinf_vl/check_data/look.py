"""Rows in parallel: what training says of each, and what is counted of it. Only hashes and numbers leave a worker process."""

import hashlib
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

from rlinf_vl.config import Config
from rlinf_vl.data.dataset import FilterResult, open_datasets
from rlinf_vl.data.images import image_size
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.errors import RunError
from rlinf_vl.types import Problem, Request

if TYPE_CHECKING:
    from rlinf_vl.models.families import ImageProcessor

#: Rows that a process looks at between two reports; a process more is started for so many times as many.
CHUNK, CHUNKS_PER_PROCESS = 64, 8

#: Values of data.image_max_pixels to choose from.
PIXEL_BUDGETS = tuple(side * side for side in (256, 384, 512, 768, 1024, 1536))


class ImageFacts(NamedTuple):
    hash: str  # of its encoded bytes
    height: int
    width: int
    bytes: int
    #: At data.image_max_pixels and each of `PIXEL_BUDGETS`, -1 below the least; () without a model.
    tokens: tuple[int, ...]


class Seen(NamedTuple):
    """A row that is a problem, usable or not."""

    row: int
    text: str  # hash of its texts, spaces and case aside, with the places of images
    answer: str
    tokens: int  # of its whole prompt; 0 without a model
    images: tuple[ImageFacts, ...]


#: (split, rows) → what training says of them, and the facts.
Look = Callable[[str, Sequence[int]], tuple[FilterResult, list[Seen]]]


def make_look(config: Config, model_path: str | None) -> Look:
    """Load the data, and tokenizer and image processor of the model; without one, tokens are not counted."""
    from rlinf_vl.rollout.prompts import Prompts
    from rlinf_vl.rollout.renderer import Renderer
    from rlinf_vl.rollout.row_check import RowCheck, env_maker_of, processor_of

    data, prompts = config.data, None
    processors: list[ImageProcessor | None] = []
    if model_path is not None:
        processor = processor_of(config, model_path)
        limits = config.runner.seq_length, data.max_prompt_length, data.overlong
        renderer = Renderer(processor, config.rollout.thinking.mode)
        prompts = Prompts(renderer, processor.image_token_id, *limits)
        if processor.family.vision_tower:
            make = partial(processor.family.image_processor, model_path, data.image_min_pixels)
            processors = [processor.image_processor, *map(partial(_unless_refused, make), PIXEL_BUDGETS)]

    @cache
    def tokens_of(height: int, width: int) -> tuple[int, ...]:
        return tuple(prod(p.grid(height, width)) // p.merge_size**2 if p else -1 for p in processors)

    check, datasets = RowCheck(config, prompts, env_maker_of(config)), open_datasets(data, ENVIRONMENTS)

    def look(split: str, rows: Sequence[int]) -> tuple[FilterResult, list[Seen]]:
        seen: dict[int, Seen] = {}

        def see(row: int, problem: Problem, request: Request | None) -> None:
            sizes = [image_size(image) for image in problem.images]
            images = tuple(
                ImageFacts(image.hash[:24], *size, len(image.data), tokens_of(*size))
                for image, size in zip(problem.images, sizes, strict=True)
            )
            tokens = len(request.ids) if request else 0
            if row not in seen or seen[row].tokens < tokens:  # of several wordings the longest
                seen[row] = Seen(row, _text_hash(problem), problem.answer.strip(), tokens, images)

        return check.filter(datasets[split], rows, see), list(seen.values())

    return look


def _unless_refused(make: "Callable[[int], ImageProcessor]", max_pixels: int) -> "ImageProcessor | None":
    try:
        return make(max_pixels)
    except ValueError:  # it is below the least area
        return None


def _text_hash(problem: Problem) -> str:
    parts = [part for message in problem.messages if message["role"] != "system" for part in message["content"]]
    text = "\0".join(" ".join(part.get("text", "").casefold().split()) for part in parts)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def look_at(
    config: Config, model_path: str | None, rows: Mapping[str, int], workers: int, progress: Callable[[int], None]
) -> dict[str, tuple[FilterResult, list[Seen]]]:
    """Look at the first so many rows of each split, in `workers` processes if there are enough rows for that.

    Args:
        progress: told how many rows are done since it was last told.

    Raises:
        RunError: a process died.
    """
    chunks = [(split, range(at, min(at + CHUNK, n))) for split, n in rows.items() for at in range(0, n, CHUNK)]
    found: dict[str, list[tuple[FilterResult, list[Seen]]]] = {split: [] for split in rows}
    with _looking(config, model_path, min(workers, -(-len(chunks) // CHUNKS_PER_PROCESS))) as run:
        for split, part in run(chunks):
            found[split].append(part)
            progress(sum(map(len, (part[0].kept, part[0].too_long, part[0].bad, part[0].text_only))))
    return {
        split: (FilterResult.merged([result for result, _ in parts]), sorted(f for _, facts in parts for f in facts))
        for split, parts in found.items()
    }


_Run = Callable[[Sequence[tuple[str, range]]], Iterator[tuple[str, tuple[FilterResult, list[Seen]]]]]


@contextmanager
def _looking(config: Config, model_path: str | None, workers: int) -> Iterator[_Run]:
    """What looks at chunks, and gives them back as they are done."""
    if workers <= 1:
        look = make_look(config, model_path)
        yield lambda chunks: ((split, look(split, rows)) for split, rows in chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (config, model_path))
    try:

        def run(chunks: Sequence[tuple[str, range]]) -> Iterator[tuple[str, tuple[FilterResult, list[Seen]]]]:
            running = {pool.submit(_look, split, rows): split for split, rows in chunks}
            for done in as_completed(running):
                yield running.pop(done), done.result()

        yield run
    except BrokenProcessPool as error:
        raise RunError(
            "a process that looked at rows died, perhaps for want of memory; name fewer of them with --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_asked: list[tuple[Config, str | None]] = []


def _begin(config: Config, model_path: str | None) -> None:
    """Begin a new process, which makes its look when it is first asked: an error of that is then an answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("rlinf_vl").setLevel(logging.ERROR)  # the parent has opened the data, too, and warned
    warnings.simplefilter("ignore")
    _asked.append((config, model_path))


@cache
def _own_look() -> Look:
    return make_look(*_asked[0])


def _look(split: str, rows: range) -> tuple[FilterResult, list[Seen]]:
    return _own_look()(split, rows)
