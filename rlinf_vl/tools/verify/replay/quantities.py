"""The quantities of a training step in the order of their computation, and the trace that one
implementation leaves of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

#: Stages of a step, in order. Those in `EXACT` are whole numbers or must be equal to the bit.
STAGES = (
    "prompt ids",
    "images",
    "image grids",
    "placeholders",
    "pixels",
    "engine weights",
    "positions",
    "rotary angles",
    "vision layer",
    "vision features",
    "deepstack features",
    "embeddings",
    "decoder layer",
    "final norm",
    "logits",
    "logprobs",
    "rollout logprobs",
    "loss mask",
    "old logprobs",
    "advantages",
    "correction weights",
    "token loss",
    "loss",
    "trained weights",
    "gradient",
    "gradient norm",
    "weight after the step",
)
EXACT = frozenset(
    {
        "prompt ids",
        "images",
        "image grids",
        "placeholders",
        "engine weights",
        "positions",
        "loss mask",
        "trained weights",
    }
)
#: Parts of a layer, in order; "" is a stage without parts.
PARTS = ("", "input", "attention", "mlp input", "experts", "mlp", "output")


class Quantity(NamedTuple):
    """A quantity; sorting puts quantities in the order of their computation.

    `layer` is the number of a layer or of a deepstack feature, 0 elsewhere; `part` an index into
    `PARTS`.
    """

    stage: int
    layer: int = 0
    part: int = 0

    @classmethod
    def of(cls, stage: str, layer: int = 0, part: str = "") -> "Quantity":
        return cls(STAGES.index(stage), layer, PARTS.index(part))

    @property
    def stage_name(self) -> str:
        return STAGES[self.stage]

    @property
    def part_name(self) -> str:
        return PARTS[self.part]

    @property
    def exact(self) -> bool:
        """Whether two implementations must agree to the bit."""
        return self.stage_name in EXACT

    def __str__(self) -> str:
        layered = self.part or self.stage_name == "deepstack features"
        name = f"{self.stage_name} {self.layer}" if layered else self.stage_name
        return f"{name}, {self.part_name}" if self.part else name


#: The owner of an array: (group, trajectory, sequence), the digest of an image's pixels, the name
#: of a weight, or "".
Owner = tuple[int, int, int] | str


@dataclass
class Trace:
    """The quantities that one implementation computed: by quantity and owner an array, whose first
    axis counts tokens, patches or values."""

    values: dict[Quantity, dict[Owner, np.ndarray]] = field(default_factory=dict)
    #: Of the plain code: sampled ids of each sequence, and the ids that are never sampled.
    targets: dict[Owner, np.ndarray] = field(default_factory=dict)
    banned: np.ndarray | None = None

    def put(self, quantity: Quantity, owner: Owner, array: np.ndarray) -> None:
        """Store an array, unless there is one: the first forward of a sequence counts."""
        self.values.setdefault(quantity, {}).setdefault(owner, array)

    def append(self, quantity: Quantity, owner: Owner, array: np.ndarray) -> None:
        """Add further tokens behind those that are stored."""
        owners = self.values.setdefault(quantity, {})
        stored = owners.get(owner)
        owners[owner] = array if stored is None else np.concatenate([stored, array])

    def get(self, quantity: Quantity) -> Mapping[Owner, np.ndarray]:
        return self.values.get(quantity, {})

    def __iter__(self) -> Iterator[Quantity]:
        return iter(sorted(self.values))
