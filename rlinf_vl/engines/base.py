"""The protocol of generation engines."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from rlinf_vl.types import Completion, Request
from rlinf_vl.weights.buckets import Label
from rlinf_vl.weights.patch import Patch
from rlinf_vl.weights.process_group import WeightGroup

#: The uses of an engine's device memory, by the names under which it is released and restored.
MEMORY_TAGS = ("weights", "kv_cache")
#: Weights up to this share of a GPU's memory stay on the GPU while the trainer runs.
SMALL_WEIGHTS = 0.1
#: Left free of a GPU, at least, by `rollout.gpu_memory_utilization: auto` where an engine wakes
#: beside a rank: neither side's allocator gives all of its memory back, and the engine takes its
#: whole KV cache at once.
WAKE_RESERVE_BYTES = int(2.5 * 2**30)


def release_tags(weight_bytes: int, gpu_bytes: int) -> tuple[str, ...]:
    """Return the memory that an engine releases while a trainer needs its GPU: the KV cache, and
    weights unless they are small.

    Small weights are not worth two copies a step, nor the host memory of a copy.

    Args:
        weight_bytes: size of the engine's weights on one GPU.
        gpu_bytes: memory of that GPU.
    """
    return ("kv_cache",) if weight_bytes <= SMALL_WEIGHTS * gpu_bytes else MEMORY_TAGS


def low_memory(free_bytes: int) -> str | None:
    """Return a warning if an engine that woke has left less of its GPU free than is safe, and None otherwise."""
    if free_bytes >= WAKE_RESERVE_BYTES / 2:
        return None
    return (
        f"{free_bytes / 2**30:.1f} GiB of the GPU are free while engines generate, beside ranks "
        "that keep memory there: set actor.enable_offload=true, or lower "
        "rollout.gpu_memory_utilization"
    )


class EngineDied(RuntimeError):
    """The engine has ended or did not start. Its requests must go to another engine."""


class Engine(Protocol):
    """An engine that samples from the policy. Thread-safe: requests may be submitted while others
    run."""

    version: int
    """The weight version of the next sampled token."""
    reads_labels: bool
    """Whether processes of the engine read weights themselves (`load_labels`): this process has
    none of its GPUs' memory."""

    @property
    def prefilled_tokens(self) -> int:
        """The number of tokens prefilled since the engine started: of prompts, and again after an
        update.

        Tokens whose keys and values were cached are not counted.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Queue requests in order, and return at once.

        Each future resolves when all samples of its request are done. Cancelling a future cancels
        the request.
        """
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit requests and wait for their completions."""
        ...

    def end_sessions(self, names: Sequence[str]) -> None:
        """Drop the caches of these sessions (`Request.sessions`); unknown names are ignored.

        A weight update drops the caches of all sessions, unless `rollout.kv_after_update` is keep.
        """

    def load_weights(
        self, buckets: Iterable[Mapping[str, torch.Tensor | Patch]], version: int
    ) -> None:
        """Overwrite named weights, or some of their values, between two decoding steps.

        Tokens sampled from then on carry `version`. Running requests keep their tokens and
        continue. Their keys and values are recomputed with the new weights, or kept
        (`rollout.kv_after_update`). If this raises, no token is sampled until another call has
        loaded all weights.

        Raises ValueError for an unknown name or another shape.
        """

    def join_weight_group(self, group: WeightGroup) -> None:
        """Join `group` as its members from `group.rank` on: one, or one per GPU of the engine.

        The group joined before is left. Returns when all members have joined.
        """

    def load_broadcast(self, labels: Sequence[Label], version: int) -> None:
        """Load the weights that rank 0 of the joined group broadcasts, bucket by bucket as in
        `labels`.

        Otherwise like `load_weights`.
        """

    def load_labels(self, labels: Sequence[Any], version: int) -> None:
        """Load what these labels name or hold (`StagedBucket`, `Delta`, `Bucket`).

        Otherwise like `load_weights`; only where `reads_labels`.
        """

    def fingerprint(self, names: Sequence[str]) -> int | None:
        """Return `rlinf_vl.weights.buckets.fingerprint` of the engine's weights, or None if it
        can't read them."""
        ...

    def pause(self) -> None:
        """Pause between two decoding steps; running requests keep their progress."""

    def resume(self) -> None:
        """Continue after `pause`."""

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Release the device memory of these `MEMORY_TAGS` for the trainer. No request may be
        running.

        Until all of it is restored, generating raises AssertionError, as does `load_weights` while
        the weights are released. Memory already released stays released.
        """

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Allocate the released memory of these tags again; other memory is unchanged.

        Weights are restored as they were; the KV cache is empty.
        """

    def alive(self, timeout_s: float = 30.0) -> bool:
        """Return False if the engine has ended or does not answer within `timeout_s`."""
        ...

    def close(self) -> None:
        """End the engine; unfinished futures fail."""
