"""Engines and trainer on the same GPUs: who has the memory when, and in which order it changes hands.

| phase | engines have | ranks have (with `actor.enable_offload`) |
|---|---|---|
| generate | weights, KV cache | parameters, optimizer (–) |
| train | – (small weights stay: `release_tags`) | everything, activations |
| sync | weights | parameters, optimizer (parameters), a bucket or, by handle, a copy in the engines' dtype |

From training to generating: the ranks give back what they have cached (and the optimizer's state), the engines take the
memory of their weights, the weights are synced where a sync is due, the ranks move their parameters away where they do at
all, and last the engines take their KV cache. The sync comes before the parameters leave: it gathers them on the device, and
its peak (parameters and two copies in the engines' dtype, 8 bytes a parameter) is below that of training (16 bytes a
parameter and activations), which has to fit anyway.

On the CPU the same is done in the same order and frees nothing, so that a fault of order fails there, too.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlinf_vl.observe.spans import span


class Engines(Protocol):
    """What is needed of a `RolloutPool`."""

    def release_tags(self) -> Sequence[str]:
        """What engines give back while the ranks train."""
        ...

    def release_memory(self, tags: Sequence[str]) -> None:
        """Have every engine release these tags; those released before stay so."""

    def restore_memory(self, tags: Sequence[str]) -> None:
        """Have every engine restore these tags; those not released are left alone."""


class Ranks(Protocol):
    """What is needed of an `ActorGroup`."""

    def release_memory(self, parts: Sequence[str]) -> Any:
        """Have every rank move these parts to host memory, and give back what it has cached."""

    def restore_memory(self) -> Any:
        """Have every rank take back what it moved away."""


class SharedGpu:
    """The turns that engines and ranks take. Where they share no GPU, only syncs happen."""

    def __init__(self, engines: Engines, *, shared: bool, offload: bool) -> None:
        """Engines have started. `offload`: ranks keep nothing on the device while engines generate."""
        self._engines, self._shared, self._offload = engines, shared, shared and offload
        self._tags = tuple(engines.release_tags()) if shared else ()

    def to_ranks(self, ranks: Ranks | None = None) -> None:
        """The engines sleep, and the ranks take the GPU. None: they are not there yet. Again: does nothing."""
        if not self._shared:
            return
        with span("release engine memory"):
            self._engines.release_memory(self._tags)
        if self._offload and ranks is not None:
            with span("onload"):
                ranks.restore_memory()

    def to_engines(self, ranks: Ranks, sync: Callable[[], None] | None = None) -> None:
        """The engines take the GPU, and new weights by calling `sync`, if given."""
        if self._shared:
            with span("release rank memory"):
                ranks.release_memory(("optimizer",) if self._offload else ())
            with span("restore engine weights"):
                self._engines.restore_memory(("weights",))
        if sync is not None:
            sync()
        if self._shared:
            if self._offload or sync is not None:  # a sync leaves cached memory behind
                with span("release rank memory"):
                    ranks.release_memory(("optimizer", "weights") if self._offload else ())
            with span("restore engine cache"):
                self._engines.restore_memory(("kv_cache",))
