"""What a rank moves from its device to host memory while collocated engines use the device, and back before it trains.

There are two parts: `optimizer` (its state, and the reference) and `weights` (the policy's parameters; a weight sync wants them
on the device, so they go last). Host memory is page-locked beside a GPU, where it is filled several times as fast, and is
allocated once: page-locking costs more than the copy.
"""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn

PARTS = ("optimizer", "weights")


class Offload:
    """Moves the parts of one rank. Between steps only: no gradient may be alive."""

    def __init__(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None, device: str
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._reference = reference
        self._device = device
        self._away: set[str] = set()
        self._host: dict[object, torch.Tensor] = {}

    def release(self, parts: Iterable[str]) -> None:
        """Move these `PARTS` to host memory, unless they are there; then give the device's cached memory back."""
        for part in set(parts) - self._away:
            self._move(part, self._to_host)
            self._away.add(part)
        if self._device == "cuda":
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move everything back to the device."""
        for part in sorted(self._away):
            self._move(part, lambda value, _: value.to(self._device, non_blocking=True))
        self._away.clear()

    def _move(self, part: str, moved: Callable[[torch.Tensor, object], torch.Tensor]) -> None:
        def parameter_moved(value: torch.Tensor) -> torch.Tensor:  # buffers are small, and stay
            return moved(value, id(value)) if isinstance(value, nn.Parameter) else value

        with torch.no_grad():
            if part == "weights":
                self._policy._apply(parameter_moved)  # as `nn.Module.to` does
                return
            if self._reference is not None:
                self._reference._apply(parameter_moved)
            for parameter, state in self._optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        state[name] = moved(value, (id(parameter), name))

    def _to_host(self, value: torch.Tensor, key: object) -> torch.Tensor:
        if key not in self._host:
            self._host[key] = torch.empty_like(value, device="cpu", pin_memory=self._device == "cuda")
        return self._host[key].copy_(value, non_blocking=True)
