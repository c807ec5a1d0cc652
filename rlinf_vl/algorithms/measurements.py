"""Measurements that a loss or an estimator makes beside its result: sums and counts by name.

A mean of means would weigh a token by how it was packed. So a measurement is kept as the sum of its
values and their number, which are added up over micro-batches and ranks and divided once.
"""

import re
from typing import Any

import torch

from rlinf_vl.algorithms.aggregation import zero_outside

#: Names of measurements: parts of a metric's name, joined by slashes.
_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


class Measurements(dict[str, tuple[torch.Tensor, torch.Tensor]]):
    """The sum of a measurement's values and their number, by its name; detached scalars."""

    def add(self, name: str, values: Any, mask: torch.Tensor | None, kind: str) -> None:
        """Add the values inside the mask to the measurement called `name`.

        Args:
            values: numbers or a tensor of them, with at least one dimension.
            mask: bool, of the shape of `values`; None counts all values.
            kind: a noun for messages: the unit that a value is of.

        Raises:
            ValueError: the name has other characters than `A-Za-z0-9_.-/`, or shapes differ.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"log: the name {name!r} must consist of letters, digits and _ . - /, like "
                "'clipped/negative'"
            )
        values = torch.as_tensor(values).detach()
        if values.ndim == 0:
            raise ValueError(
                f"log: {name!r} is a single number; give a value for each {kind}, from which the "
                "mean over all of them is computed"
            )
        if mask is None:
            mask = torch.ones_like(values, dtype=torch.bool)
        if mask.dtype != torch.bool or mask.shape != values.shape:
            raise ValueError(
                f"log: {name!r} has values of shape {tuple(values.shape)} and a mask of "
                f"{mask.dtype} of shape {tuple(mask.shape)}; give a boolean mask of the same shape"
            )
        total, count = zero_outside(values.double(), mask).sum(), mask.sum()
        if name in self:
            former_total, former_count = self[name]
            total, count = former_total + total, former_count + count
        self[name] = total, count
