"""What a run goes on from: all that a checkpoint holds besides the actor ranks' part, and the checkpoints themselves."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rlinf_vl.runtime.run_folder import checkpoints, load_state


@dataclass(slots=True)
class RunState:
    """A run after `step`, the last one done; `controller.json` of a checkpoint is this as JSON.

    Attributes:
        sampler: position of the `EpochSampler`.
        best: the best val/accuracy, and its step.
        bad_steps: steps in a row up to this one whose gradient was not finite.
        metrics: of this step. A checkpoint is written before its step is logged, and a crash may come between the two.
    """

    step: int = 0
    sampler: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "rows": 0})
    best: dict[str, float] = field(default_factory=lambda: {"val/accuracy": -1.0, "step": 0})
    bad_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, checkpoint: Path | None) -> Self:
        """The state in a checkpoint; None: that of a run that has not begun."""
        return cls() if checkpoint is None else cls(**load_state(checkpoint))


def newest_checkpoint(run_dir: Path, start: Path | None) -> Path | None:
    """The checkpoint a run would go back to: its own newest one, or the one that it started from."""
    found = checkpoints(run_dir)
    return found[-1][1] if found else start
