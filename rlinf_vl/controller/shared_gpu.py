"""Engines and ranks on the same GPUs: the memory of each in every phase, and the order of the
switches.

| phase | engines have | ranks have (with `actor.enable_offload`) |
|---|---|---|
| generate | weights, KV cache | parameters, optimizer (–) |
| train | – (small weights stay: `release_tags`) | everything, activations |
| sync | weights | parameters, optimizer (parameters), a few buckets |

From training to generating, in this order: the ranks release their cached memory (with offload, the
optimizer's state too), the engines restore their weights' memory, a sync follows if one is due,
with offload the ranks release their parameters, and last the engines restore their KV cache. The
sync precedes the release of parameters because it gathers them on the device; its peak (parameters,
the engines' weights and a few buckets, 6 bytes a parameter) is below that of training (16 bytes a
parameter and activations), which must fit anyway.

Where engines wake empty (`config.engines.wakes_empty`) their weights are released without a copy, and
a sync follows every sleep.

The CPU does the same in the same order and frees nothing, so that a wrong order fails there, too.
"""

from collections.abc import Callable

from rlinf_vl.controller.protocols import Learner, Pool
from rlinf_vl.observe.spans import span


class SharedGpu:
    """The switches of shared GPUs between engines and ranks. Where they share none, only syncs
    happen.

    Attributes:
        loses_weights: whether engines have no weights after a sleep, so that a sync must bring all.
    """

    def __init__(
        self, pool: Pool, *, shared: bool, offload: bool, wakes_empty: bool = False
    ) -> None:
        """
        Args:
            pool: its engines have started.
            offload: whether ranks keep nothing on the device while engines generate.
            wakes_empty: whether released weights are lost.
        """
        self._pool = pool
        self.shared = shared
        self._offload = shared and offload
        self._tags = tuple(pool.release_tags()) if shared else ()
        self.loses_weights = wakes_empty and "weights" in self._tags

    def to_ranks(self, learner: Learner | None = None) -> None:
        """Let the engines release their memory, and give the GPU to the ranks; None: they have not
        started. A second call does nothing."""
        if not self.shared:
            return
        with span("release engine memory"):
            self._pool.release_memory(self._tags)
        if self._offload and learner is not None:
            with span("onload"):
                learner.restore_memory()

    def to_engines(
        self, learner: Learner, sync: Callable[[], dict[str, float]] | None
    ) -> dict[str, float]:
        """Give the engines the GPU, and new weights by calling `sync`, if given; returns its
        metrics."""
        assert sync is not None or not self.loses_weights, "engines would wake without weights"
        if self.shared:
            with span("release rank memory"):
                learner.release_memory(("optimizer",) if self._offload else ())
            with span("restore engine weights"):
                self._pool.restore_memory(("weights",))
        metrics = sync() if sync is not None else {}
        if self.shared:
            # A sync leaves cached memory behind, which the KV cache needs.
            if self._offload or sync is not None:
                with span("release rank memory"):
                    learner.release_memory(("optimizer", "weights") if self._offload else ())
            with span("restore engine cache"):
                self._pool.restore_memory(("kv_cache",))
        return metrics
