"""What controller and ranks tell each other. Without torch and transformers, which only a rank needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf_vl.packing.planner import Item

#: Of each turn of a trajectory, by its group's number and its index: Σ KL of its sampled tokens; and of the KL from each of them on
#: to the trajectory's end, the sum and the sum of squares.
TurnKl = dict[tuple[int, int], list[tuple[float, float, float]]]
#: Of each turn of each trajectory of each group, by the group's number.
Advantages = Mapping[int, Sequence[Sequence[float]]] | Sequence[Sequence[Sequence[float]]]
#: Group → index of a trajectory in it → float32 [sampled tokens].
Logprobs = dict[int, dict[int, np.ndarray]]


@dataclass(frozen=True, slots=True)
class RankMiniBatch:
    """What one rank trains on in one optimizer step."""

    micro_batches: tuple[tuple[Item, ...], ...]  #: trajectories, by group and index
    run_vision: tuple[bool, ...]  #: of each micro-batch, whether any rank has images in it
    denominator: int  #: of the loss, a count over all ranks
