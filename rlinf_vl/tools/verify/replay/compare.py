"""The comparison of two traces: the largest difference of every quantity, and the first one that
rounding does not explain."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlinf_vl.tools.verify.replay.quantities import Owner, Quantity, Trace

#: Differences from the bound on: where no value may differ, any difference counts.
Bound = Callable[[Quantity, Owner], float]


@dataclass(frozen=True)
class Agreement:
    """A quantity as two implementations have it.

    Attributes:
        sides: the names of the implementations.
        difference: the largest absolute one.
        bound: the largest one that rounding explains.
        owner: the sequence, image or weight of the value that exceeds its bound most, else of the
            largest difference.
        index: the first token, patch or value there whose difference exceeds the bound; -1 if the
            shapes differ or nothing exceeds it.
    """

    quantity: Quantity
    sides: tuple[str, str]
    difference: float
    bound: float
    owner: Owner
    index: int = -1
    values: tuple[float, float] = (0.0, 0.0)

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound


def compare(sides: tuple[str, str], ours: Trace, reference: Trace, bound: Bound) -> list[Agreement]:
    """Return an agreement for each quantity that both traces have, in order of computation.

    Where one trace has fewer tokens of a sequence, those that both have are compared: an engine
    does not compute the last one.
    """
    agreements = []
    for quantity in ours:
        if agreement := _compare_quantity(sides, quantity, ours, reference, bound):
            agreements.append(agreement)
    return agreements


def _compare_quantity(
    sides: tuple[str, str], quantity: Quantity, ours: Trace, reference: Trace, bound: Bound
) -> Agreement | None:
    reference_values, our_values = reference.get(quantity), ours.get(quantity)
    worst_agreement: Agreement | None = None
    if quantity.stage_name == "trained weights":
        return _compare_names(sides, quantity, our_values, reference_values)
    for owner, value in our_values.items():
        reference_value = reference_values.get(owner)
        if reference_value is None:
            continue
        limit = bound(quantity, owner)
        agreement = _compare_arrays(sides, quantity, owner, value, reference_value, limit)
        if worst_agreement is None or _excess(agreement) > _excess(worst_agreement):
            worst_agreement = agreement
    return worst_agreement


def _compare_arrays(
    sides: tuple[str, str],
    quantity: Quantity,
    owner: Owner,
    value: np.ndarray,
    reference_value: np.ndarray,
    limit: float,
) -> Agreement:
    by_token = not isinstance(owner, str)
    if value.shape[1:] != reference_value.shape[1:] or (
        len(value) != len(reference_value) and not by_token
    ):
        return Agreement(quantity, sides, np.inf, limit, owner)
    n = min(len(value), len(reference_value))
    if not n:
        return Agreement(quantity, sides, 0.0, limit, owner)
    a, b = value[:n].astype(np.float64), reference_value[:n].astype(np.float64)
    with np.errstate(invalid="ignore"):
        gaps = np.abs(a - b)
    gaps[a == b] = 0.0  # both infinite
    gaps[np.isnan(gaps)] = np.inf
    rows = gaps.reshape(n, -1)
    by_row = rows.max(axis=1, initial=0.0)
    exceeding = np.flatnonzero(by_row > limit)
    index = int(exceeding[0]) if len(exceeding) else -1
    place = index if index >= 0 else int(by_row.argmax())
    column = int(rows[place].argmax()) if rows.shape[1] else 0
    pair = (float(a.reshape(n, -1)[place, column]), float(b.reshape(n, -1)[place, column]))
    return Agreement(quantity, sides, float(by_row.max()), limit, owner, index, pair)


def _compare_names(
    sides: tuple[str, str], quantity: Quantity, our_values: object, reference_values: object
) -> Agreement:
    """Compare the sets of trained weights."""
    our_names, reference_names = set(our_values), set(reference_values)  # pyright: ignore[reportArgumentType]
    differing = sorted(our_names ^ reference_names)
    name = differing[0] if differing else ""
    pair = (float(name in our_names), float(name in reference_names))
    return Agreement(quantity, sides, float(len(differing)), 0.0, name, values=pair)


def _excess(agreement: Agreement) -> float:
    """Return by what factor a difference exceeds its bound."""
    return agreement.difference / max(agreement.bound, 1e-30) if agreement.difference else 0.0


def first_difference(agreements: list[Agreement]) -> Agreement | None:
    """Return the earliest quantity that differs; of several sides the one that exceeds most."""
    differing = [a for a in agreements if not a.agrees]
    if not differing:
        return None
    first = min(a.quantity for a in differing)
    return max((a for a in differing if a.quantity == first), key=_excess)
