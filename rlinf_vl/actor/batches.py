"""Make a rank's micro-batches in the background while it trains; encode each image only once."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rlinf_vl.actor.batch_types import Advantages, Logprobs, RankMiniBatch
from rlinf_vl.actor.mesh import reshard_all
from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import PixelCache
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.packing.planner import Item
from rlinf_vl.types import Grid, Group, ImageRef, MicroBatch

T = TypeVar("T")


@dataclass(slots=True)
class ReferencePass:
    """The results of the forwards for a KL in the reward, for the coming step of one rank.

    Lists have an entry for each mini-batch, with one for each of its micro-batches.

    Attributes:
        old_logprobs: of the weights before the step, float32 [R].
        kl_to_end: the KL from each token to its trajectory's end, float64 [R].
    """

    old_logprobs: list[list[torch.Tensor]]
    kl_to_end: list[list[np.ndarray]] = field(default_factory=list)

    def penalized(self, batch: MicroBatch, m: int, i: int, scale: float) -> MicroBatch:
        """Return micro-batch `i` of mini-batch `m`, advantages less `scale` times the KL to the
        end."""
        kl_penalty = (scale * self.kl_to_end[m][i]).astype(np.float32)
        return replace(batch, advantages=batch.advantages - kl_penalty)


@dataclass(frozen=True, slots=True)
class LogprobRecord:
    """The logprobs of a step's recorded groups, on their device until all are there."""

    groups: Collection[int]
    logprobs: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def add(self, items: Sequence[Item], batch: MicroBatch, logprobs: torch.Tensor) -> None:
        """Add those of a micro-batch made of `items`: `logprobs`, of its sampled tokens."""
        for place, item in enumerate(items):
            if item.group in self.groups:
                begin, end = np.searchsorted(batch.trajectories, (place, place + 1))
                self.logprobs.setdefault(item.group, {})[item.index] = logprobs[begin:end]

    def on_host(self) -> Logprobs:
        """Return all of them, copied to the host."""
        host: Logprobs = {}
        for group, by_trajectory in self.logprobs.items():
            host[group] = {index: x.cpu().numpy() for index, x in by_trajectory.items()}
        return host


def prefetched(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`; another thread makes the next one while the caller works on the last."""
    source = iter(items)
    # One ahead, not more: an item holds the pixels of a micro-batch.
    with ThreadPoolExecutor(1) as thread:
        next_item = thread.submit(next, source, None)
        while (item := next_item.result()) is not None:
            next_item = thread.submit(next, source, None)
            yield item


def turn_kl(
    kl: np.ndarray, batch: MicroBatch, turns: int
) -> tuple[np.ndarray, list[tuple[float, float, float]]]:
    """Return the KL from each token to its trajectory's end, and the sums of each turn.

    Args:
        kl: KL of each sampled token of a micro-batch, float64 [R].
        turns: number of turns in the micro-batch.

    Returns:
        float64 [R], each token itself included; and for each turn the three sums of `TurnKl`.
    """
    cumulative = np.cumsum(kl)
    # Rows of a trajectory are contiguous and their numbers rise, so the last one ends where the
    # next number would be inserted.
    last_tokens = np.searchsorted(batch.trajectories, batch.trajectories, side="right") - 1
    kl_to_end = cumulative[last_tokens] - cumulative + kl
    sums = (
        np.bincount(batch.turns, values, turns).tolist() for values in (kl, kl_to_end, kl_to_end**2)
    )
    return kl_to_end, list(zip(*sums, strict=True))


class BatchMaker:
    """Makes the micro-batches of one rank.

    With a `cache`, the vision tower does not change: `prepare` encodes each image once, and each
    micro-batch comes with the features of its images. Without a cache, it comes with pixels, and
    the tower runs in each micro-batch.
    """

    def __init__(
        self, policy: PolicyModel, collate: Collator, cache: VisionCache | None, max_tokens: int
    ) -> None:
        """Store the parts; on ranks that share trajectories, collate this rank's part only.

        `collate.pixels` is called from several threads. Images of at most `max_tokens` tokens
        are encoded at once, or one image.
        """
        assert collate.pixels is not None
        self.pixels = collate.pixels
        if ranks := policy.context_ranks:
            collate = replace(collate, part=(ranks.rank, ranks.size))
        self.policy = policy
        self.collate = collate
        self.cache = cache
        self.max_tokens = max_tokens
        #: Whoever knows the next step's images may call it ahead, from any thread. None with a
        #: `cache`, for which `prepare` makes the pixels.
        self.pixel_cache = None if cache else PixelCache(self.pixels)
        self._collate = replace(collate, pixels=self.pixel_cache)

    def without_cache(self) -> "BatchMaker":
        return BatchMaker(self.policy, self.collate, None, self.max_tokens)

    def __call__(
        self, mini: RankMiniBatch, groups: Mapping[int, Group], advantages: Advantages
    ) -> Iterator[tuple[MicroBatch, VisionFeatures | None]]:
        """Yield each micro-batch of `mini` and, with a cache, the features of its images.

        Call `prepare` with its groups before.
        """

        def micro_batches() -> Iterator[MicroBatch]:
            for items, vision in zip(mini.micro_batches, mini.run_vision, strict=True):
                members = _members(items, groups, advantages)
                yield self._collate(members, run_vision=vision and self.cache is None)

        for batch in prefetched(micro_batches()):
            yield batch, self.cache.get(batch.images) if self.cache and batch.images else None

    def without_pixels(
        self, mini: RankMiniBatch, groups: Mapping[int, Group], advantages: Advantages
    ) -> list[MicroBatch]:
        """Return the micro-batches of `mini` for what reads their tokens alone: no image is read."""
        collate = replace(self.collate, pixels=None)
        return [
            collate(_members(items, groups, advantages), run_vision=False)
            for items in mini.micro_batches
        ]

    def prepare(self, groups: Iterable[Group]) -> None:
        """Encode the images of `groups` that the cache lacks; another thread makes the next pixels.

        Collective: all ranks call the tower equally often, those with fewer images on a blank one,
        because FSDP2 gathers the tower's weights in each call.
        """
        if self.cache is None:
            return
        # By hash: the samples of a group, and the turns of a conversation, show the same images.
        images = {image.hash: (image, grid) for group in groups for image, grid in group.images}
        self.cache.pin(images)
        missing = [images[name] for name in self.cache.missing(images)]
        chunks = _chunks(missing, self.max_tokens, self.collate.image_tokens)
        n_calls = torch.tensor(len(chunks))
        dist.all_reduce(n_calls, dist.ReduceOp.MAX)
        workers = torch.get_num_threads()
        blank = self.policy.family.blank_image(self.policy.model.config)

        def inputs() -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
            with ThreadPoolExecutor(workers) as threads:
                for chunk in chunks:
                    patches = np.concatenate(
                        list(threads.map(self.pixels, [image for image, _ in chunk]))
                    )
                    yield [i.hash for i, _ in chunk], patches, np.array([grid for _, grid in chunk])
            for _ in range(int(n_calls) - len(chunks)):
                yield [], *blank

        with torch.no_grad():
            for names, patches, grids in prefetched(inputs()):
                features = self.policy.encode(patches, grids)
                if names:
                    self.cache.put(names, features, self.collate.image_tokens(grids).tolist())
        reshard_all(self.policy)


def _members(
    items: Sequence[Item], groups: Mapping[int, Group], advantages: Advantages
) -> list[Member]:
    """Return the trajectories of a micro-batch with their groups and advantages."""
    return [Member(groups[i.group], i.index, advantages[i.group][i.index]) for i in items]


def _chunks(
    images: Sequence[tuple[ImageRef, Grid]], max_tokens: int, image_tokens: ImageTokens
) -> list[list[tuple[ImageRef, Grid]]]:
    """Return the images in order, in chunks of at most `max_tokens` tokens, or of one image."""
    grids = np.array([grid for _, grid in images], np.int64).reshape(-1, 3)
    chunks: list[list[tuple[ImageRef, Grid]]] = []
    free_tokens = 0
    for image_and_grid, tokens in zip(images, image_tokens(grids).tolist(), strict=True):
        if tokens > free_tokens:
            chunks.append([])
            free_tokens = max_tokens
        chunks[-1].append(image_and_grid)
        free_tokens -= tokens
    return chunks
