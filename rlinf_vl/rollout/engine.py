"""What every generation engine offers."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from rlinf_vl.types import Completion, Request


class EngineDied(RuntimeError):
    """The engine is gone, or never came up: it answers nothing any more, and its work must go to another."""


class Engine(Protocol):
    """Samples from the policy. Thread-safe: requests may be submitted while others are running."""

    version: int
    """Weight version that the next token is sampled with."""

    def submit(self, requests: Sequence[Request]) -> list["Future[Completion]"]:
        """Queue requests, in order and at once; each future resolves when all samples of its request are done."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit and wait."""

    def load_weights(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Overwrite named weights between two decoding steps; tokens sampled from then on carry `version`.

        Raises ValueError for an unknown name or another shape.
        """

    def pause(self) -> None:
        """Stop between two decoding steps; running requests keep their place."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def release_memory(self) -> None:
        """Give device memory back while the trainer runs. Nothing may be running."""

    def restore_memory(self) -> None:
        """Take it again."""

    def alive(self) -> bool:
        """False once the engine can't answer any more. Returns within seconds."""

    def close(self) -> None:
        """End the engine; unfinished futures fail."""
