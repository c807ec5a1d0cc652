"""Features of a vision tower that does not change: every image is encoded once.

Invariants: features of the images named by `pin` stay until the next `pin`. The device stores at
most the limit of bytes; images that no step needs are dropped first, oldest first. Host memory
stores the features that the step needs beyond the limit, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from rlinf_vl.models.family import VisionFeatures

#: Bytes of features that a trainer keeps on its device.
TRAINER_BYTES = 2**30


class VisionCache:
    """Features by content hash. Call `clear` when the tower changes."""

    def __init__(self, max_bytes: int, device: torch.device | str) -> None:
        self.max_bytes = max_bytes
        self.device = torch.device(device)
        self._pinned: dict[str, None] = {}
        #: hash → [1 + deepstack layers, N, H]; images that no step needs come first, oldest first
        self._on_device: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._on_host: dict[str, torch.Tensor] = {}
        self._device_bytes = 0

    def pin(self, hashes: Iterable[str]) -> None:
        """Keep the features of these images, which a step needs, instead of the last call's."""
        self._pinned = dict.fromkeys(hashes)
        for name in [n for n in self._pinned if n in self._on_device]:
            self._on_device.move_to_end(name)
        # Another step needs other images: features on the host may fit the device now.
        spilled, self._on_host = self._on_host, {}
        for name in [n for n in spilled if n in self._pinned]:
            self._store(name, spilled[name])

    def missing(self, hashes: Iterable[str]) -> list[str]:
        """Return the hashes without features, each once, in order."""
        return [
            h for h in dict.fromkeys(hashes) if h not in self._on_device and h not in self._on_host
        ]

    def put(self, hashes: Sequence[str], features: VisionFeatures, tokens: Sequence[int]) -> None:
        """Store the tower's features of these images, which have so many `tokens` each.

        Features of an image that no step needs are stored only where there is room.
        """
        stack = torch.stack([features.tokens, *features.deepstack]).detach()
        for name, features_of_image in zip(hashes, stack.split(list(tokens), dim=1), strict=True):
            if self.missing([name]):
                self._store(name, features_of_image.clone())

    def get(self, hashes: Sequence[str]) -> VisionFeatures:
        """Return the features of these images, end to end, on the cache's device.

        Raises:
            KeyError: one is missing; its hash is the argument.
        """
        stacks = (self._on_host[h] if h in self._on_host else self._on_device[h] for h in hashes)
        stack = torch.cat([s.to(self.device, non_blocking=True) for s in stacks], dim=1)
        return VisionFeatures(stack[0], tuple(stack[1:]))

    def clear(self) -> None:
        """Drop all features."""
        self._on_device.clear()
        self._on_host.clear()
        self._device_bytes = 0

    def _store(self, name: str, stack: torch.Tensor) -> None:
        """Store features on the device, dropping images that no step needs, or on the host."""
        while (
            self._device_bytes + stack.nbytes > self.max_bytes
            and (oldest := next(iter(self._on_device), None)) is not None
        ):
            if oldest in self._pinned:
                break
            self._device_bytes -= self._on_device.pop(oldest).nbytes
        if self._device_bytes + stack.nbytes <= self.max_bytes:
            self._on_device[name] = stack.to(self.device, non_blocking=True)
            self._device_bytes += stack.nbytes
        elif name in self._pinned:
            self._on_host[name] = stack if stack.device.type == "cpu" else stack.cpu().pin_memory()
