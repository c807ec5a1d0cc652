"""`cluster.component_placement`: which slots (accelerators; on CPU, processes) each component takes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError, nearest

COMPONENTS = ("actor", "rollout")
_KEY = "cluster.component_placement"
#: More than any cluster has; a longer range would fill the memory before it was found out.
_MOST_SLOTS = 100_000


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a run, ascending: one for each actor rank, `tensor_parallel_size` for each engine.

    Raises:
        ConfigError: slots do not come out even, or engines of several slots share them with actor ranks.
    """

    actor: tuple[int, ...]
    rollout: tuple[int, ...]
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_context(len(self.actor), self.context_parallel_size)
        size, key = self.tensor_parallel_size, "rollout.tensor_parallel_size"
        if size > 1 and self.shared:
            raise ConfigError(
                f"{key}: {size} needs slots of its own, but {_KEY} puts actor and rollout on the same ones; split them, as in "
                "{actor: 0-3, rollout: 4-7}"
            )
        if len(self.rollout) % size:
            raise ConfigError(f"{key}: {size} does not divide the {len(self.rollout)} slots of rollout in {_KEY}")

    @property
    def shared(self) -> bool:
        """Whether an actor rank and an engine share a slot, so that they take turns with its memory."""
        return bool(set(self.actor) & set(self.rollout))

    @property
    def beside_actors(self) -> bool:
        """Whether every slot of rollout has an actor rank."""
        return set(self.rollout) <= set(self.actor)

    @property
    def engines(self) -> list[tuple[int, ...]]:
        """The slots of each engine."""
        size = self.tensor_parallel_size
        return [self.rollout[i : i + size] for i in range(0, len(self.rollout), size)]


def check_context(ranks: int, size: int) -> None:
    """ConfigError unless so many actor ranks come out even in sets of `size` that share their rows."""
    if ranks % size:
        raise ConfigError(f"actor.context_parallel_size: {size} does not divide the {ranks} slots of actor in {_KEY}")


def placement_of(config: Config, n_slots: int) -> Placement:
    """A run's placement on a cluster of `n_slots`.

    Raises:
        ConfigError: out-of-range slots; see also `parse_placement` and `Placement`.
    """
    named = parse_placement(config.cluster.component_placement)
    if n_slots == 0:
        raise ConfigError(
            f"{_KEY}: no slots: the cluster has none of cluster.device; set that to cpu, or start Ray where there are GPUs"
        )
    slots = {component: tuple(range(n_slots)) if s is None else s for component, s in named.items()}
    for component, chosen in slots.items():
        if chosen[-1] >= n_slots:
            there = f"the cluster has {n_slots}, numbered 0 to {n_slots - 1}"
            raise ConfigError(f"{_KEY}: '{component}' wants slot {chosen[-1]}, but {there}")
    sizes = config.rollout.tensor_parallel_size, config.actor.context_parallel_size
    return Placement(slots["actor"], slots["rollout"], *sizes)


def parse_placement(component_placement: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The slots that each component names; None stands for `all`. An entry set to null is dropped.

    Args:
        component_placement: comma-separated component names → `all`, an integer, or ranges as in "0-3", "0-1,4".

    Raises:
        ConfigError: an unknown, repeated or missing component; malformed or repeated slots.
    """
    slots: dict[str, tuple[int, ...] | None] = {}
    entries: dict[str, str] = {}  # component → its entry's names
    for names, value in component_placement.items():
        for component in (name.strip() for name in str(names).split(",") if value is not None):
            if component not in COMPONENTS:
                hint = nearest(component, COMPONENTS)
                raise ConfigError(f"{_KEY}: unknown component {component!r}; components are actor and rollout;{hint}")
            if component in entries:
                both = f"by {entries[component]!r} and by {names!r}"
                raise ConfigError(f"{_KEY}: '{component}' is placed twice, {both}; set one of the two to null")
            entries[component] = names
            slots[component] = _parse_slots(f"{_KEY}: '{names}: {value}'", str(value).replace(" ", ""))
    for component in COMPONENTS:
        if component not in slots:
            raise ConfigError(
                f"{_KEY}: {dict(component_placement)} has no place for '{component}'; for example {{actor: all, rollout: all}}, or "
                "{actor: 0-3, rollout: 4-7}"
            )
    return {component: slots[component] for component in COMPONENTS}


def slots_named(component_placement: Mapping[str, Any]) -> int:
    """Slots that the placement names by number, which a private CPU cluster is given; `all` names none."""
    return max(slots[-1] + 1 if slots else 0 for slots in parse_placement(component_placement).values())


def shares_slots(component_placement: Mapping[str, Any]) -> bool:
    """`Placement.shared`, before the number of slots is known."""
    actor, rollout = parse_placement(component_placement).values()
    return actor is None or rollout is None or bool(set(actor) & set(rollout))


def _parse_slots(entry: str, text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    slots: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise ConfigError(f"{entry} isn't all, a slot, or ranges such as 0-3 or 0-1,4")
        if last >= _MOST_SLOTS:
            raise ConfigError(f"{entry} names a slot that no cluster has; slots are numbered from 0")
        slots += range(first, last + 1)
    if len(set(slots)) < len(slots):
        raise ConfigError(f"{entry} names a slot twice; name every slot once")
    return tuple(sorted(slots))
