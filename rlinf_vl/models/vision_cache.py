"""Features of a vision tower that does not change: every image is encoded once, whoever asks for it, however often.

Invariant: the features of an image named by `hold` stay until the next `hold`; others go, oldest first, to stay within the
limit of bytes. On an accelerator what exceeds the limit is spilled to host memory and comes back when it is asked for.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from rlinf_vl.models.families import VisionFeatures


class VisionCache:
    """Features by content hash. `clear` it when the tower changes."""

    def __init__(self, max_bytes: int, device: torch.device | str) -> None:
        self.max_bytes, self.device = max_bytes, torch.device(device)
        self._stacks: OrderedDict[str, torch.Tensor] = OrderedDict()  # [1 + deepstack layers, N, H]
        self._wanted: set[str] = set()

    def hold(self, hashes: Iterable[str]) -> None:
        """These images are needed from now on, those of the call before no more."""
        self._wanted = set(hashes)
        for name in self._wanted & self._stacks.keys():
            self._stacks.move_to_end(name)
        self._shrink()

    def missing(self, hashes: Iterable[str]) -> list[str]:
        """Those without features yet, each once, in order."""
        return [h for h in dict.fromkeys(hashes) if h not in self._stacks]

    def put(self, hashes: Sequence[str], features: VisionFeatures, tokens: Sequence[int]) -> None:
        """Keep what the tower gave for these images, which have so many tokens each."""
        stack = torch.stack([features.tokens, *features.deepstack]).detach()
        for name, part in zip(hashes, stack.split(list(tokens), dim=1), strict=True):
            self._stacks[name] = part.clone()
        self._shrink()

    def get(self, hashes: Sequence[str]) -> VisionFeatures:
        """Features of these images, end to end, on the cache's device; KeyError names one that was never put."""
        stack = torch.cat([self._stacks[h].to(self.device, non_blocking=True) for h in hashes], dim=1)
        return VisionFeatures(stack[0], tuple(stack[1:]))

    def clear(self) -> None:
        """Forget every image."""
        self._stacks.clear()

    def _shrink(self) -> None:
        spilling = self.device.type != "cpu"
        used = sum(s.nbytes for s in self._stacks.values() if s.device.type == self.device.type)
        for name in [n for n in self._stacks if n not in self._wanted] + [n for n in self._stacks if n in self._wanted]:
            stack = self._stacks[name]
            if used <= self.max_bytes:
                return
            if stack.device.type != self.device.type:
                continue
            if name not in self._wanted:
                del self._stacks[name]
            elif spilling:
                self._stacks[name] = stack.cpu().pin_memory()
            else:
                return  # host memory is all there is, and the step needs them
            used -= stack.nbytes
