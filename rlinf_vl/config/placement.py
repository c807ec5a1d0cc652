"""`cluster.component_placement`: which slots (accelerators; on CPU, processes) each component takes.

Slots are numbered over the whole cluster, node by node: those of node 0 come first. An entry names slots, nodes, or a mode:

| entry | slots |
|---|---|
| `all` | every slot of the cluster |
| `0-3,6` | these |
| `nodes 0-1` | every slot of these nodes |
| `nodes all slots 0-3` | of each of these nodes, these slots; a node's own slots are numbered from 0 |
| `4-7:0,8-11:1-2` | engine 0 on slots 4 to 7, engines 1 and 2 on two each; a part without `:` has engines of tensor_parallel_size |
| one of `MODES` | both components' |
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError, nearest

COMPONENTS = ("actor", "rollout")
#: `single_node_split` and, on one node, `disaggregated` halve the node's slots; on several, the latter halves the nodes. Where
#: halves don't come out even, rollout has the larger one.
MODES = ("collocated", "disaggregated", "single_node_split")
_KEY = "cluster.component_placement"
_EXAMPLE = "{actor: 0-3, rollout: 4-7}"
_ELASTIC_SHARES = (
    f"cluster.elastic_rollout: true, but {_KEY} puts actor and rollout on the same slots, where engines and ranks take turns; "
    f"give engines slots of their own, as in {_KEY}=disaggregated or {_EXAMPLE}"
)
#: More than any cluster has; a longer range would fill the memory before it was found out.
_MOST_SLOTS = 100_000


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a run: one for each actor rank, ascending, and those of each engine. `nodes`: how many each node has.

    Raises:
        ConfigError: slots do not come out even, or an engine can't have these.
    """

    actor: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_context(len(self.actor), self.context_parallel_size)
        for number, engine in enumerate(self.engines):
            name = f"engine {number} (slots {ranges(engine)})"
            if len(engine) > 1 and set(engine) & set(self.actor):
                raise ConfigError(
                    f"rollout.tensor_parallel_size: {len(engine)} needs slots of its own, but {_KEY} puts actor and {name} on "
                    f"the same ones; split them, as in {_EXAMPLE}"
                )
            if len(on := {self.node_of(slot) for slot in engine}) > 1:
                raise ConfigError(
                    f"{_KEY}: {name} would span nodes {ranges(on)}; an engine's slots are of one node, and "
                    f"{described(self.nodes)}"
                )

    @property
    def rollout(self) -> tuple[int, ...]:
        """The slots of all engines."""
        return tuple(slot for engine in self.engines for slot in engine)

    @property
    def shared(self) -> bool:
        """Whether an actor rank and an engine share a slot, so that they take turns with its memory."""
        return bool(set(self.actor) & set(self.rollout))

    @property
    def beside_actors(self) -> bool:
        """Whether every slot of rollout has an actor rank."""
        return set(self.rollout) <= set(self.actor)

    def node_of(self, slot: int) -> int:
        return next(node for node, end in enumerate(accumulate(self.nodes)) if slot < end)

    def map(self, names: Sequence[str] = ()) -> str:
        """Who sits where, a line for each node; `names` are the nodes', such as their addresses."""
        ranks = {slot: ("actor rank", rank) for rank, slot in enumerate(self.actor)}
        engines = {
            slot: (f"engine of {len(engine)} slots" if len(engine) > 1 else "engine", number)
            for number, engine in enumerate(self.engines)
            for slot in engine
        }
        lines, free = [], []
        for node, slots in enumerate(_slots_of(self.nodes)):
            if not set(slots) & {*ranks, *engines}:
                free.append(node)
                continue
            users = {slot: [of[slot] for of in (ranks, engines) if slot in of] for slot in slots}
            told = []
            for kinds, alike in groupby(slots, key=lambda slot, users=users: [kind for kind, _ in users[slot]]):
                run = list(alike)
                who = [_numbered(kind, {users[slot][i][1] for slot in run}) for i, kind in enumerate(kinds)]
                told.append(f"{ranges(run)}: {' and '.join(who) or 'free'}")
            name = f" ({names[node]})" if names else ""
            lines.append(f"node {node}{name}: slots {'; '.join(told)}")
        return "\n".join([*lines, *([f"free: node{'s' * (len(free) > 1)} {ranges(free)}"] if free else [])])


def check_context(ranks: int, size: int) -> None:
    """ConfigError unless so many actor ranks come out even in sets of `size` that share their rows."""
    if ranks % size:
        raise ConfigError(f"actor.context_parallel_size: {size} does not divide the {ranks} slots of actor in {_KEY}")


def placement_of(config: Config, nodes: Sequence[int]) -> Placement:
    """A run's placement on a cluster whose nodes have so many slots each.

    Raises:
        ConfigError: slots or nodes that the cluster does not have; see also `parse_placement` and `Placement`.
    """
    named = parse_placement(config.cluster.component_placement)
    tp, context = config.rollout.tensor_parallel_size, config.actor.context_parallel_size
    if not any(nodes):
        raise ConfigError(
            f"{_KEY}: no slots: the cluster has none of cluster.device; set that to cpu, or start Ray where there are GPUs"
        )
    if (mode := named["actor"].text) in MODES:
        actor, rollout = _halves(mode, nodes, tp, context)
        return Placement(actor, tuple(_engines(rollout, None, tp, nodes)), tuple(nodes), context)
    slots = {c: [(_slots(c, entry, part, nodes), part.processes) for part in entry.parts] for c, entry in named.items()}
    engines = [e for part, processes in slots["rollout"] for e in _engines(part, processes, tp, nodes)]
    ranks = sorted(slot for part, _ in slots["actor"] for slot in part)
    placement = Placement(tuple(ranks), tuple(engines), tuple(nodes), context)
    if config.cluster.elastic_rollout and placement.shared:
        raise ConfigError(_ELASTIC_SHARES)
    if config.rollout.rollout_backend == "torch" and (large := [engine for engine in engines if len(engine) > 1]):
        raise ConfigError(
            f"{_KEY}: an engine with slots {ranges(large[0])}, but rollout.rollout_backend is torch, whose engines have one; set "
            "sglang, or as many engines as slots"
        )
    return placement


@dataclass(frozen=True, slots=True)
class _Part:
    """Of an entry, what stands between two commas: slots or nodes (None: all), and how many engines have them (None: not said)."""

    numbers: tuple[int, ...] | None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """What one component is given: parts of slots, or of nodes (of each of which, `within` if given, are meant), or a mode."""

    text: str
    parts: tuple[_Part, ...] = ()
    of_nodes: bool = False
    within: tuple[int, ...] | None = None

    @property
    def slots(self) -> set[int] | None:
        """The slots that it names by their numbers; None where only the cluster tells."""
        if self.of_nodes or any(part.numbers is None for part in self.parts) or not self.parts:
            return None
        return {slot for part in self.parts for slot in part.numbers or ()}


def parse_placement(component_placement: Mapping[str, Any]) -> dict[str, Entry]:
    """What each component is given. An entry set to null is dropped.

    Args:
        component_placement: comma-separated component names → an entry, as in the table above.

    Raises:
        ConfigError: an unknown, repeated or missing component; a malformed entry.
    """
    entries: dict[str, Entry] = {}
    by: dict[str, str] = {}  # component → its entry's names
    for names, value in component_placement.items():
        for component in (name.strip() for name in str(names).split(",") if value is not None):
            if component not in COMPONENTS:
                hint = nearest(component, COMPONENTS)
                raise ConfigError(f"{_KEY}: unknown component {component!r}; components are actor and rollout;{hint}")
            if component in by:
                both = f"by {by[component]!r} and by {names!r}"
                raise ConfigError(f"{_KEY}: '{component}' is placed twice, {both}; set one of the two to null")
            by[component] = names
            entries[component] = _parse_entry(f"{_KEY}: '{names}: {value}'", str(value))
    for component in COMPONENTS:
        if component not in entries:
            raise ConfigError(
                f"{_KEY}: {dict(component_placement)} has no place for '{component}'; for example collocated, "
                f"{{actor: all, rollout: all}}, or {_EXAMPLE}"
            )
    texts = {component: entries[component].text for component in COMPONENTS}
    if any(text in MODES for text in texts.values()) and len(set(texts.values())) > 1:
        raise ConfigError(
            f"{_KEY}: {dict(component_placement)} gives a mode to one component; a mode places both, as in {_KEY}={MODES[1]}"
        )
    return {component: entries[component] for component in COMPONENTS}


def check_placement(config: Config) -> None:
    """ConfigError where the placement is wrong on any cluster."""
    named = parse_placement(config.cluster.component_placement)
    if (ranks := named["actor"].slots) is not None:
        check_context(len(ranks), max(1, config.actor.context_parallel_size))
    if any(part.processes not in (None, len(part.numbers or ())) for part in named["actor"].parts):
        raise ConfigError(
            f"{_KEY}: 'actor: {named['actor'].text}' shares slots out; each actor rank has one: leave ':…' out"
        )
    if config.cluster.elastic_rollout and shares_slots(config.cluster.component_placement):
        raise ConfigError(_ELASTIC_SHARES)


def slots_named(config: Config) -> int:
    """Slots that the placement needs on one node, which a private CPU cluster is given; `all` needs none."""
    named = parse_placement(config.cluster.component_placement)
    if named["actor"].text in MODES[1:]:
        return config.rollout.tensor_parallel_size + config.actor.context_parallel_size
    highest = [max(entry.slots or entry.within or (-1,)) for entry in named.values()]
    return 1 + max(highest)


def shares_slots(component_placement: Mapping[str, Any]) -> bool:
    """`Placement.shared`, as far as it can be told without the cluster: slots by number and slots by node count as different."""
    actor, rollout = parse_placement(component_placement).values()
    if actor.text in MODES:
        return actor.text == MODES[0]
    if "all" in (actor.text, rollout.text):
        return True
    if actor.slots is not None and rollout.slots is not None:
        return bool(actor.slots & rollout.slots)
    if not (actor.of_nodes and rollout.of_nodes):
        return False
    nodes = [[part.numbers for part in entry.parts] for entry in (actor, rollout)]
    alike = any(a is None or b is None or set(a) & set(b) for a in nodes[0] for b in nodes[1])
    return alike and (
        None in (actor.within, rollout.within) or bool(set(actor.within or ()) & set(rollout.within or ()))
    )


def described(nodes: Sequence[int]) -> str:
    """What the cluster has."""
    if len(nodes) == 1:
        return f"the cluster has {nodes[0]}, numbered 0 to {nodes[0] - 1}"
    if len(set(nodes)) == 1 and len(nodes) > 4:
        return f"the cluster has {len(nodes)} nodes of {nodes[0]} slots each, numbered 0 to {sum(nodes) - 1}"
    each = ", ".join(f"node {node} with slots {ranges(slots)}" for node, slots in enumerate(_slots_of(nodes)))
    return f"the cluster has {len(nodes)} nodes: {each}"


def ranges(numbers: Iterable[int]) -> str:
    """As in "0-3,6"."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def _numbered(kind: str, numbers: set[int]) -> str:
    """As in "engines 0-3 of 2 slots"."""
    what, _, rest = kind.partition(" of ")
    return f"{what}{'s' * (len(numbers) > 1)} {ranges(numbers)}{' of ' * bool(rest)}{rest}"


def _slots_of(nodes: Sequence[int]) -> list[range]:
    return [range(end - size, end) for end, size in zip(accumulate(nodes), nodes, strict=True)]


def _halves(mode: str, nodes: Sequence[int], tp: int, context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots of actor and of rollout in a mode."""
    n = sum(nodes)
    if mode == "collocated":
        return tuple(range(n)), tuple(range(n))
    if len(nodes) > 1:
        if mode == "single_node_split":
            way_out = "write disaggregated, or {actor: nodes all slots 0-3, rollout: nodes all slots 4-7}"
            raise ConfigError(f"{_KEY}: {mode} is for one node, and {described(nodes)}; {way_out}")
        first = sum(nodes[: len(nodes) // 2])
        return tuple(range(first)), tuple(range(first, n))
    ranks = [ranks for ranks in range(context, n, context) if (n - ranks) % tp == 0]
    if not ranks:
        raise ConfigError(
            f"{_KEY}: {mode} finds no halves: {described(nodes)}; actor takes {context} or a multiple "
            f"(actor.context_parallel_size), rollout {tp} or a multiple (rollout.tensor_parallel_size); name the slots, as in "
            f"{_EXAMPLE}, or write collocated"
        )
    half = min(ranks, key=lambda ranks: (abs(n - 2 * ranks), ranks))
    return tuple(range(half)), tuple(range(half, n))


def _slots(component: str, entry: Entry, part: _Part, nodes: Sequence[int]) -> list[int]:
    """The slots of a part of an entry."""
    there = _slots_of(nodes)
    if not entry.of_nodes:
        chosen = list(range(sum(nodes)) if part.numbers is None else part.numbers)
        if max(chosen) >= sum(nodes):
            raise ConfigError(f"{_KEY}: '{component}' wants slot {max(chosen)}, but {described(nodes)}")
        return chosen
    chosen = []
    for node in range(len(nodes)) if part.numbers is None else part.numbers:
        if node >= len(nodes):
            raise ConfigError(f"{_KEY}: '{component}' wants node {node}, numbered from 0, but {described(nodes)}")
        if entry.within and entry.within[-1] >= nodes[node]:
            raise ConfigError(
                f"{_KEY}: '{component}' wants slot {entry.within[-1]} of node {node}, which has {nodes[node]}, numbered from 0"
            )
        chosen += [there[node][slot] for slot in entry.within or range(nodes[node])]
    return chosen


def _engines(slots: Sequence[int], processes: int | None, tp: int, nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The slots of each engine of a part: so many engines, or else engines of `tp` slots, node by node."""
    if processes is not None:
        if len(slots) % processes:
            raise ConfigError(
                f"{_KEY}: {processes} engines can't share {len(slots)} slots ({ranges(slots)}) evenly; each has one or more of "
                "its own"
            )
        size = len(slots) // processes
        yield from (tuple(slots[i : i + size]) for i in range(0, len(slots), size))
        return
    for node, there in enumerate(_slots_of(nodes)):
        mine = sorted(set(slots) & set(there))
        if len(mine) % tp:
            where = f" on node {node}" if len(nodes) > 1 else ""
            raise ConfigError(
                f"rollout.tensor_parallel_size: {tp} does not divide the {len(mine)} slots of rollout{where} in {_KEY} "
                f"({ranges(mine)}); lower it, or give each engine its slots, as in '4-7:0,8-9:1'"
            )
        yield from (tuple(mine[i : i + tp]) for i in range(0, len(mine), tp))


def _parse_entry(entry: str, written: str) -> Entry:
    text = " ".join(written.split())
    if text in MODES:
        return Entry(text)
    named, slots, within = text.partition(" slots ")
    of_nodes = re.match("nodes? ", named)
    parts = list[_Part]()
    for part in named[of_nodes.end() if of_nodes else 0 :].replace(" ", "").split(","):
        numbers, colon, processes = part.partition(":")
        made = _numbers(entry, processes) if colon else ()
        before = sum(part.processes or 0 for part in parts)
        if made and made != tuple(range(before, before + len(made))):
            raise ConfigError(
                f"{entry}: {processes!r} behind ':' numbers engines; they count on from {before}, each once"
            )
        parts.append(_Part(None if numbers == "all" else _numbers(entry, numbers), len(made) or None))
    chosen = [number for part in parts for number in part.numbers or ()]
    if len(set(chosen)) < len(chosen) or (len(parts) > 1 and any(part.numbers is None for part in parts)):
        raise ConfigError(f"{entry} names a {'node' if of_nodes else 'slot'} twice; name each once")
    plain = [part for part in parts if part.processes is None and part.numbers is not None]
    if len(plain) > 1:  # one list of slots, whatever engines are made of it
        parts = [part for part in parts if part not in plain]
        parts.append(_Part(tuple(sorted(number for part in plain for number in part.numbers or ()))))
    return Entry(text, tuple(parts), bool(of_nodes), _numbers(entry, within.replace(" ", "")) if slots else None)


def _numbers(entry: str, text: str) -> tuple[int, ...]:
    """Ascending, from ranges such as "0-3,6"."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise ConfigError(
                f"{entry} isn't all, a slot, or ranges such as 0-3 or 0-1,4; nor nodes ('nodes 0-1', 'nodes all slots 0-3'), nor "
                f"one of {', '.join(MODES)}"
            )
        if last >= _MOST_SLOTS:
            raise ConfigError(f"{entry} names a slot that no cluster has; slots are numbered from 0")
        if numbers & set(range(first, last + 1)):
            raise ConfigError(f"{entry} names a slot twice; name each once")
        numbers |= set(range(first, last + 1))
    return tuple(sorted(numbers))
