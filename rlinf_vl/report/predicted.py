"""Compare the seconds of a run's steps with what `preflight --time` expected of them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: A measured phase → the phases of the estimate that it has.
MEASURED = {
    "generate": ("generate",),
    "train": ("images", "logprobs", "train"),
    "sync": ("sync", "wake"),
}
#: Phases that come on some steps only, and are not compared.
OCCASIONAL = ("check", "validate", "checkpoint")
#: First steps, which are slower, and are left out.
WARM_UP = 2


class PredictedPhase(NamedTuple):
    """A row of the table: seconds of a phase, as expected and as the median of the run's steps."""

    phase: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """The measured seconds over the expected ones."""
        return self.measured / self.predicted if self.predicted else None


def compare_prediction(
    prediction: Mapping[str, Any], metrics: Sequence[Mapping[str, float | None]]
) -> list[PredictedPhase]:
    """Return the rows of a run; none without a prediction, or before its third step."""
    steps = [row for row in metrics if row.get("time/step") is not None][WARM_UP:]
    phases = prediction.get("phases")
    if not steps or not isinstance(phases, dict):
        return []
    rows = []
    # Ahead of training, the time waited for groups is not the time that they took.
    compared = MEASURED if prediction.get("schedule") == "sync" else {"train": MEASURED["train"]}
    for name, parts in compared.items():
        predicted = sum(float(phases.get(part, 0.0)) for part in parts)
        measured = statistics.median(step.get(f"time/{name}") or 0.0 for step in steps)
        rows.append(PredictedPhase(name, predicted, measured))
    occasional = [sum(step.get(f"time/{name}") or 0.0 for name in OCCASIONAL) for step in steps]
    step_seconds = [
        (step["time/step"] or 0.0) - o for step, o in zip(steps, occasional, strict=True)
    ]
    predicted = float(prediction.get("seconds", 0.0)) - float(phases.get("checkpoint", 0.0))
    return [*rows, PredictedPhase("whole step", predicted, statistics.median(step_seconds))]
