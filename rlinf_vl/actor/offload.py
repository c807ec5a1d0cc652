"""Move parts of a rank to host memory while collocated engines use its device, and back.

The part `optimizer` is the optimizer's state, the reference and a teacher; `weights` is the
policy's parameters, which move last, because a weight sync reads them on the device. Beside a GPU,
host memory is page-locked, which makes copies several times as fast; it is allocated once, because
page-locking costs more than a copy.
"""

import gc
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

PARTS = ("optimizer", "weights")


class Offload:
    """Moves the parts of one rank, between steps only: there may be no gradients."""

    def __init__(
        self,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        frozen: Sequence[nn.Module],
        device: str,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._frozen = frozen
        self._device = device
        self._away: set[str] = set()  # parts in host memory
        self._host: dict[object, torch.Tensor] = {}  # memory for each tensor, by `_to_host`'s key

    def release(self, parts: Iterable[str]) -> None:
        """Move these `PARTS` to host memory, unless they are there; free cached device memory."""
        for part in set(parts) - self._away:
            self._move(part, self._to_host)
            self._away.add(part)
        if self._device == "cuda":
            torch.cuda.synchronize()
            gc.collect()  # a cycle may still hold device tensors, whose memory could not be freed
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move everything back to the device."""
        for part in sorted(self._away):
            self._move(part, lambda value, _: value.to(self._device, non_blocking=True))
        self._away.clear()

    def measured(self) -> dict[str, float]:
        """Return GiB of the device: this process's peak of tensors, and the use by all processes.

        The peak is the one since the last call. Without a GPU the result is empty.
        """
        if self._device != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return {
            "actor/gpu_memory_peak": peak / 2**30,
            "actor/gpu_memory_used": (total - free) / 2**30,
        }

    def _move(self, part: str, move_tensor: Callable[[torch.Tensor, object], torch.Tensor]) -> None:
        def move_parameter(value: torch.Tensor) -> torch.Tensor:  # buffers are small, and stay
            return move_tensor(value, id(value)) if isinstance(value, nn.Parameter) else value

        with torch.no_grad():
            if part == "weights":
                self._policy._apply(move_parameter)  # as `nn.Module.to` does
                return
            for model in self._frozen:
                model._apply(move_parameter)
            for parameter, state in self._optimizer.state.items():
                for name, value in state.items():
                    # A scalar is AdamW's step count: too small to be worth a move.
                    if isinstance(value, torch.Tensor) and value.ndim:
                        state[name] = move_tensor(value, (id(parameter), name))

    def _to_host(self, value: torch.Tensor, key: object) -> torch.Tensor:
        if key not in self._host:
            self._host[key] = torch.empty_like(
                value, device="cpu", pin_memory=self._device == "cuda"
            )
        return self._host[key].copy_(value, non_blocking=True)
