"""What every generation engine offers."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from rlinf_vl.transport.broadcast import WeightGroup
from rlinf_vl.transport.buckets import Label
from rlinf_vl.transport.delta import Patch
from rlinf_vl.types import Completion, Request

#: What an engine's device memory is used for, by the names under which it is released and restored.
MEMORY_TAGS = ("weights", "kv_cache")
#: Weights up to this share of a GPU's memory stay there while the trainer runs.
SMALL_WEIGHTS = 0.1
#: Left free of a GPU by `rollout.gpu_memory_utilization: auto` where an engine wakes beside a rank: neither side's allocator gives
#: all of its memory back, and the engine takes its whole KV cache at once.
WAKE_RESERVE_BYTES = int(2.5 * 2**30)


def release_tags(weight_bytes: int, gpu_bytes: int) -> tuple[str, ...]:
    """What an engine gives back while a trainer needs its GPU: the KV cache always, its weights unless they are small.

    Small weights are not worth two copies a step, nor the host memory of a copy.

    Args:
        weight_bytes: of the engine's weights on one GPU.
        gpu_bytes: memory of that GPU.
    """
    return ("kv_cache",) if weight_bytes <= SMALL_WEIGHTS * gpu_bytes else MEMORY_TAGS


def low_memory(free_bytes: int) -> str | None:
    """Return a warning if an engine that woke has left less of its GPU free than is safe, and None otherwise."""
    if free_bytes >= WAKE_RESERVE_BYTES / 2:
        return None
    return (
        f"{free_bytes / 2**30:.1f} GiB of the GPU are free while engines generate, beside ranks that keep memory there: set "
        "actor.enable_offload=true, or lower rollout.gpu_memory_utilization"
    )


class EngineDied(RuntimeError):
    """The engine is gone, or never came up: it answers nothing any more, and its work must go to another."""


class Engine(Protocol):
    """Samples from the policy. Thread-safe: requests may be submitted while others are running."""

    version: int
    """Weight version that the next token is sampled with."""

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed since the engine started, and tokens computed again after an update; those whose keys and values it
        still had are not counted."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Queue requests, in order and at once; each future resolves when all samples of its request are done. A request whose
        future is cancelled is given up."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit and wait."""
        ...

    def end_sessions(self, names: Sequence[str]) -> None:
        """Drop what is kept under these names of `Request.sessions`, known or not. A weight update drops everything, unless
        `rollout.kv_after_update` is keep."""

    def load_weights(self, buckets: Iterable[Mapping[str, torch.Tensor | Patch]], version: int) -> None:
        """Overwrite named weights, or some of their values, between two decoding steps; tokens sampled from then on carry
        `version`.

        Requests may be running: they keep the tokens that they have, and go on. What was computed of them is computed again by the
        new weights, or kept (`rollout.kv_after_update`). If this raises, no token is sampled until another call brings all weights.

        Raises ValueError for an unknown name or another shape.
        """

    def join_weight_group(self, group: WeightGroup) -> None:
        """Become the members of `group` from `group.rank` on (one, or one per GPU of the engine), in place of the group joined
        before. Returns when all members have joined."""

    def load_broadcast(self, labels: Sequence[Label], version: int) -> None:
        """`load_weights` of what rank 0 of the joined group broadcasts, bucket by bucket as in `labels`."""

    def fingerprint(self, names: Sequence[str]) -> int | None:
        """`rlinf_vl.transport.buckets.fingerprint` of the engine's own weights; None if it can't be known."""
        ...

    def pause(self) -> None:
        """Stop between two decoding steps; running requests keep their progress."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Give the device memory of these `MEMORY_TAGS` back while the trainer runs. Nothing may be running.

        Until all of it is restored, generating is an error of the caller (AssertionError); so is `load_weights` while the
        weights are released. What was released before stays as it is."""

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Allocate the memory of these tags again. What was not released is left alone: a fresh engine needs no restoring.

        Weights come back as they were; the KV cache comes back empty."""

    def alive(self, timeout_s: float = 30.0) -> bool:
        """False once the engine can't answer any more, or does not within `timeout_s`."""
        ...

    def close(self) -> None:
        """End the engine; unfinished futures fail."""
