"""`cluster.component_placement`: which slots (accelerators; on CPU, processes) each component takes."""

import re
from collections.abc import Mapping
from typing import Any

from rlinf_vl.config.keys import nearest
from rlinf_vl.errors import ConfigError

COMPONENTS = ("actor", "rollout")
_KEY = "cluster.component_placement"
#: More than any cluster has; a longer range would fill the memory before it was found out.
_MOST_SLOTS = 100_000
_EXAMPLE = "for example {actor: all, rollout: all}, or {actor: 0-3, rollout: 4-7}"


def placement_slots(component_placement: Mapping[str, Any], n_slots: int | None = None) -> dict[str, tuple[int, ...]]:
    """Slots of every component, ascending.

    Args:
        component_placement: comma-separated component names → `all`, an integer, or ranges as in "0-3", "0-1,4".
        n_slots: slots the cluster has; None if not known yet, and then `all` can't be placed.

    Raises:
        ConfigError: an unknown, repeated or missing component; malformed, repeated or out-of-range slots.
    """
    placed = parse_placement(component_placement)
    slots: dict[str, tuple[int, ...]] = {}
    for component, chosen in placed.items():
        if chosen is None:
            if n_slots is None:
                raise ConfigError(f"{_KEY}: '{component}: all' needs the number of slots, which isn't known yet")
            chosen = tuple(range(n_slots))
        if n_slots == 0:
            raise ConfigError(
                f"{_KEY}: no slot for '{component}': the cluster has none of cluster.device; set that to cpu, or start Ray where "
                "there are GPUs"
            )
        if n_slots is not None and chosen[-1] >= n_slots:
            raise ConfigError(
                f"{_KEY}: '{component}' wants slot {chosen[-1]}, but the cluster has {n_slots}, "
                f"numbered 0 to {n_slots - 1}"
            )
        slots[component] = chosen
    return slots


def parse_placement(component_placement: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """`placement_slots` without a cluster: None stands for `all`. An entry set to null is dropped."""
    placed: dict[str, tuple[int, ...] | None] = {}
    taken: dict[str, str] = {}
    for names, value in component_placement.items():
        if value is None:
            continue
        for component in (name.strip() for name in str(names).split(",")):
            if component not in COMPONENTS:
                hint = nearest(component, COMPONENTS)
                raise ConfigError(f"{_KEY}: unknown component {component!r}; components are actor and rollout;{hint}")
            if component in placed:
                raise ConfigError(
                    f"{_KEY}: '{component}' is placed twice, by {taken[component]!r} and by {names!r}; "
                    f"set one of the two to null to drop it"
                )
            placed[component], taken[component] = _parse_slots(str(names), value), str(names)
    for component in COMPONENTS:
        if component not in placed:
            raise ConfigError(f"{_KEY}: {dict(component_placement)} has no place for '{component}'; {_EXAMPLE}")
    return {component: placed[component] for component in COMPONENTS}


def slots_named(component_placement: Mapping[str, Any]) -> int:
    """Slots that the placement names by number, which a private CPU cluster is given; `all` names none."""
    return max((max(slots) + 1 for slots in parse_placement(component_placement).values() if slots), default=0)


def shares_slots(component_placement: Mapping[str, Any]) -> bool:
    """Whether an actor rank and an engine sit on the same slot, so that they take turns with its memory."""
    placed = parse_placement(component_placement)
    actor, rollout = placed["actor"], placed["rollout"]
    return actor is None or rollout is None or bool(set(actor) & set(rollout))


def engine_slots(slots: tuple[int, ...], size: int, shared: bool) -> list[tuple[int, ...]]:
    """The slots of each engine, `size` apiece.

    Raises:
        ConfigError: they do not come out even, or engines of several slots share them with actor ranks.
    """
    if size > 1 and shared:
        raise ConfigError(
            f"rollout.tensor_parallel_size: {size} needs slots of its own, but cluster.component_placement puts actor and "
            "rollout on the same ones; split them, as in {actor: 0-3, rollout: 4-7}"
        )
    if len(slots) % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size: {size} does not divide the {len(slots)} slots of rollout in "
            "cluster.component_placement"
        )
    return [tuple(slots[i : i + size]) for i in range(0, len(slots), size)]


def _parse_slots(names: str, value: Any) -> tuple[int, ...] | None:
    text = str(value).replace(" ", "")
    if text == "all":
        return None
    slots: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise ConfigError(f"{_KEY}: '{names}: {value}' isn't all, a slot, or ranges such as 0-3 or 0-1,4")
        if last >= _MOST_SLOTS:
            raise ConfigError(f"{_KEY}: '{names}: {value}' names a slot that no cluster has; slots are numbered from 0")
        slots.extend(range(first, last + 1))
    if len(set(slots)) < len(slots):
        raise ConfigError(f"{_KEY}: '{names}: {value}' names a slot twice; name every slot once")
    return tuple(sorted(slots))
