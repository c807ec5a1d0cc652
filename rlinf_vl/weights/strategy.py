"""The interface of weight-sync strategies, and the choice among them."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

import torch

from rlinf_vl.weights import STRATEGIES
from rlinf_vl.weights.buckets import BUCKET_BYTES, Label, read_buckets
from rlinf_vl.weights.patch import Patch
from rlinf_vl.weights.sender import Sender


@dataclass(frozen=True, slots=True)
class Site:
    """The machines that a strategy must work on.

    Attributes:
        device: "cpu" or "cuda".
        collocated: whether any engine shares a slot with an actor rank.
        beside_actors: whether every engine does, so that an actor rank is on its GPU, or its node.
    """

    device: str
    collocated: bool
    beside_actors: bool


class LoadingEngine(Protocol):
    """The part of `rlinf_vl.engines.base.Engine` that receives weights."""

    version: int
    reads_labels: bool

    def load_weights(
        self, buckets: Iterable[Mapping[str, torch.Tensor | Patch]], version: int
    ) -> None: ...

    def load_broadcast(self, labels: Sequence[Label], version: int) -> None: ...

    def load_labels(self, labels: Sequence[Any], version: int) -> None: ...


class Strategy:
    """A way of weights from ranks to engines: all that other rooms ask about it.

    It has no state, so it travels to every process; ranks have the state, in their senders. The
    defaults are those of a strategy whose receivers need nothing but their labels.

    Attributes:
        name: its key in `STRATEGIES`.
        sender: the class of the ranks' ends.
        through_store: whether labels refer to objects in Ray's object store. Then a wait for the
            offer of a rank that dies fails, so that a sync can be queued while ranks train, and
            workers may join it late.
        joins_group: whether rank 0 and all engines meet in a process group. Then the receivers are
            chosen before weights are offered, and the sender has `listen` and `join` (`broadcast`).
        forwards_labels: whether an engine of several processes is given labels, not weights: each of
            its processes reads for itself what a label names.
        sends_changes: whether it sends only what has changed since the last sync.
        survives_lost_ranks: whether a run that goes on without some of its ranks keeps it.
            Otherwise such a run takes `FALLBACK`.
    """

    name: ClassVar[str]
    sender: ClassVar[type[Sender]]
    through_store: ClassVar[bool] = False
    joins_group: ClassVar[bool] = False
    forwards_labels: ClassVar[bool] = False
    sends_changes: ClassVar[bool] = False
    survives_lost_ranks: ClassVar[bool] = False

    # --- where it works, and what it takes --------------------------------------------------------

    def obstacle(self, site: Site) -> str:
        """Return why it can't work on this site; "" if it can."""
        return ""

    def suits(self, site: Site) -> bool:
        """Return whether `auto` may choose it for this site."""
        return not self.obstacle(site)

    def sender_peak_bytes(self, largest_weight_bytes: int) -> int:
        """Return the device memory that a sync takes on a rank, beside a gathered weight.

        A bucket is sent once it has `BUCKET_BYTES`, so one that holds a large weight is larger.
        """
        # A bucket that is sent, and one made meanwhile.
        return 2 * max(BUCKET_BYTES, largest_weight_bytes)

    def receiver_peak_bytes(self, largest_weight_bytes: int) -> int:
        """Return the device memory that a sync takes beside an engine on a GPU of its own."""
        return 2 * max(BUCKET_BYTES, largest_weight_bytes)

    def waits_for_readers(self, device: str) -> bool:
        """Return whether `Sender.deliver` needs the place and process id of each worker."""
        return False

    # --- the worker's end -------------------------------------------------------------------------

    async def fetch(
        self, labels: Sequence[Any], places: Callable[[], Sequence[str]]
    ) -> Sequence[Any]:
        """Return those of all ranks' labels that a worker needs, with what they refer to.

        `places`: returns those of its engine.
        """
        return labels

    def received(
        self, labels: Sequence[Any], device: str
    ) -> Generator[Mapping[str, torch.Tensor | Patch]]:
        """Yield the weights of each label, or their changes, as views to be copied.

        Args:
            labels: a result of `fetch`.
            device: the device on which changes are unpacked.

        Raises:
            WeightsDiffer: the received weights have another fingerprint than their label.
        """
        return read_buckets(labels, device)

    def load(self, engine: LoadingEngine, labels: Sequence[Any], version: int, device: str) -> None:
        """Load the weights of labels from `fetch` into the engine, as this version."""
        if self.forwards_labels and engine.reads_labels:
            engine.load_labels(labels, version)
            return
        weights = self.received(labels, device)
        try:
            engine.load_weights(weights, version)
        finally:
            weights.close()  # a sender may wait for receivers that are not done


def strategy_named(name: str) -> Strategy:
    """Return the strategy of this name."""
    module, _, class_name = STRATEGIES[name].path.partition(":")
    return getattr(import_module(module), class_name)()


def choose_strategy(name: str, site: Site) -> Strategy:
    """Return the strategy that a value of `rollout.weight_sync` means on this site.

    Raises:
        ValueError: the strategy can't work there.
    """
    if name == "auto":
        return next(
            strategy for strategy in map(strategy_named, STRATEGIES) if strategy.suits(site)
        )
    strategy = strategy_named(name)
    if obstacle := strategy.obstacle(site):
        raise ValueError(
            f"rollout.weight_sync: {name} does not go with this cluster.component_placement: "
            f"{obstacle}; set auto"
        )
    return strategy
