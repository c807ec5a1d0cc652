"""The types that the controller and the ranks exchange.

They import neither torch nor transformers, which only a rank needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf_vl.packing.planner import Item
from rlinf_vl.types import TurnAdvantages

#: (group, trajectory) → three sums over the sampled tokens of each turn, in nats: of their KL; of
#: the KL from each of them on to the trajectory's end; and of the squares of the latter.
TurnKl = dict[tuple[int, int], list[tuple[float, float, float]]]
#: The advantages of all: group → trajectory → turn.
Advantages = Mapping[int, Sequence[TurnAdvantages]] | Sequence[Sequence[TurnAdvantages]]
#: Group → index of a trajectory in it → float32 [sampled tokens].
Logprobs = dict[int, dict[int, np.ndarray]]


@dataclass(frozen=True, slots=True)
class RankMiniBatch:
    """The trajectories that one rank trains on in one optimizer step."""

    micro_batches: tuple[tuple[Item, ...], ...]  #: trajectories, by group and index
    run_vision: tuple[bool, ...]  #: for each micro-batch, whether any rank has images in it
    denominator: int  #: of the loss, a count over all ranks
