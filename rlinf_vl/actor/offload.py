"""What a rank gives up of its device while collocated engines need it, and takes back before it trains.

Two parts move to host memory and back: `optimizer` (its state, and the frozen reference) and `weights` (the parameters that
are trained; a weight sync wants them on the device, so they go last). The host memory is page-locked beside a GPU, where
it is filled several times as fast, and it is the same every time: page-locking costs more than the copy.
"""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn

#: Parts of a rank's memory that it can move away.
PARTS = ("optimizer", "weights")


class Offload:
    """Moves the parts of one rank. Between steps only: no gradient may be alive."""

    def __init__(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None, device: str
    ) -> None:
        self._policy, self._optimizer, self._reference, self._device = policy, optimizer, reference, device
        self._away: set[str] = set()
        self._host: dict[object, torch.Tensor] = {}

    def release(self, parts: Iterable[str]) -> None:
        """Move these `PARTS` to host memory, those that are there excepted; then give the device's cached memory back."""
        for part in set(parts) - self._away:
            self._move(part, self._to_host)
            self._away.add(part)
        if self._device == "cuda":
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move everything back that was moved away."""
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
