"""Changes of a weight, as an engine receives them."""

from dataclasses import dataclass, field

import torch

#: Integers as wide as a value, so that bits are compared: -0 is not 0, and NaN is NaN.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes of one weight.

    Attributes:
        parts: (indices in the flat weight, values as integers).
    """

    dtype: torch.dtype
    shape: torch.Size
    parts: list[tuple[torch.Tensor | slice, torch.Tensor]] = field(default_factory=list)

    def apply(self, weight: torch.Tensor) -> None:
        """Write the values into `weight`, contiguous, of this shape and dtype."""
        assert weight.dtype == self.dtype, f"values of {self.dtype} for a weight of {weight.dtype}"
        flat = weight.detach().view(-1).view(INTEGERS[weight.element_size()])
        for indices, values in self.parts:
            flat[indices] = values

    def masked(self, device: str) -> torch.Tensor:
        """Return a weight that has the values and is NaN elsewhere."""
        weight = torch.full(self.shape, torch.nan, dtype=self.dtype, device=device)
        self.apply(weight)
        return weight
