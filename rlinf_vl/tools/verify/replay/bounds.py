"""How far two sound implementations may differ: measured, not guessed.

Sound implementations differ by the order of their sums and by fused operations, which round
otherwise. The plain code is run again with random errors of half a unit in the last place of every
weight and every pixel; such an error enters each product, as rounding does, and grows through the
layers in the same manner. The largest change of a quantity that these runs show, times `FACTOR`,
and a few units in the last place of its largest value are the bound of that quantity.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlinf_vl.tools.verify.replay.plain import DIGITS
from rlinf_vl.tools.verify.replay.quantities import Owner, Quantity, Trace

#: The largest of many differences by rounding, over the largest of those by nudged inputs: below 3
#: on sound members of six families, and planted faults exceed 8 by far.
FACTOR = 8.0
#: Units in the last place of a quantity's largest value, for quantities that no nudge changes.
UNITS = 4.0
#: Quantities that have a bound for each owner, as weights have scales of their own.
BY_OWNER = frozenset({"gradient", "weight after the step", "engine weights"})


@dataclass
class Bounds:
    """The bounds of one dtype.

    Attributes:
        base: the plain code's trace.
        nudged: its traces with errors.
    """

    base: Trace
    nudged: Sequence[Trace]
    dtype: torch.dtype

    def of(self, quantity: Quantity, owner: Owner) -> float:
        """Return the largest difference that rounding explains."""
        if quantity.exact:
            return 0.0
        key = (quantity, owner if quantity.stage_name in BY_OWNER else "")
        if key not in self._bounds_by_key:
            self._bounds_by_key[key] = self._measure(quantity, owner)
        return self._bounds_by_key[key]

    def __post_init__(self) -> None:
        self._bounds_by_key: dict[tuple[Quantity, Owner], float] = {}

    def _measure(self, quantity: Quantity, owner: Owner) -> float:
        values = self.base.get(quantity)
        owners = [owner] if quantity.stage_name in BY_OWNER else list(values)
        noise = largest = 0.0
        for name in owners:
            value = values.get(name)
            if value is None or not value.size:
                continue
            largest = max(largest, float(np.abs(value[np.isfinite(value)]).max(initial=0.0)))
            for trace in self.nudged:
                nudged_value = trace.get(quantity).get(name)
                if nudged_value is not None and nudged_value.shape == value.shape:
                    gap = np.abs(nudged_value - value)
                    noise = max(noise, float(gap[np.isfinite(gap)].max(initial=0.0)))
        return FACTOR * noise + UNITS * 2.0 ** -DIGITS[self.dtype] * largest
